"""tau and alpha by context, of a draft whose acceptance depends on the position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from draftsmith.drafters.interface import UnrollBatch, UnrolledStep
from draftsmith.kernels.acceptance import bucket_of
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.command import context_table
from draftsmith.train.evaluate.teacher_forced import (
    DraftRule,
    Evaluation,
    count_documents,
    summarise,
)
from tests.table_target import TableTarget

VOCAB, K = 16, 3
TURN = 300  # from here on the draft is right about every third token alone
LENGTHS = {"short": 90, "middle": 400, "long": 700}


class TiringDraft:
    """The target up to position `TURN`; wrong behind it wherever the position is no multiple of
    3."""

    taps: tuple[int, ...] = ()
    vocab_map = None

    def head_weight(self) -> torch.Tensor:
        return torch.eye(VOCAB)

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        position = torch.arange(1, batch.input_ids.shape[1] + 1)
        drafted = (batch.input_ids + 1 + ~is_right(position)) % VOCAB
        hidden = torch.nn.functional.one_hot(drafted, VOCAB).float()
        yield UnrolledStep(hidden=hidden, valid=batch.attention_mask.bool(), offset=1)


def is_right(position: torch.Tensor) -> torch.Tensor:
    """Of the draft, about the token at `position`."""
    return (position < TURN) | (position % 3 == 0)


def played(length: int, prompt: int) -> dict[int, list[int]]:
    """Rounds, committed, offered and accepted first tokens by bucket, played one by one."""
    found: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    right, at = is_right(torch.arange(length)).tolist(), prompt
    while at < length:
        kept = 0
        while kept < K and at + kept < length and right[at + kept]:
            kept += 1
        committed = min(kept + 1, length - at)
        for entry, value in enumerate((1, committed, 1, kept > 0)):
            found[bucket_of(at)][entry] += value
        at += committed
    return found


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    texts = [
        TokenSequence(name, torch.arange(length) % VOCAB, torch.arange(length) >= 4)
        for name, length in LENGTHS.items()
    ]
    # Token v is always followed by v + 1.
    target = TableTarget(torch.eye(VOCAB).roll(1, dims=1))
    rule = DraftRule(0.0, K)
    return summarise(count_documents(TiringDraft(), target, texts, rule), rule)


def test_a_planted_dependence_is_found_to_the_round(evaluation: Evaluation) -> None:
    expected: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for length in LENGTHS.values():
        for bucket, values in played(length, 4).items():
            expected[bucket] = [a + b for a, b in zip(expected[bucket], values)]
    found = evaluation.by_context
    assert [(one.begin, one.end) for one in found] == [(0, 256), (256, 512), (512, 1024)]
    assert [one.documents for one in found] == [3, 2, 1]
    for bucket, one in enumerate(found):
        rounds, committed, offered, accepted = expected[bucket]
        assert (one.rounds, one.tokens) == (pytest.approx(rounds), pytest.approx(committed))
        assert one.tau.value == pytest.approx(committed / rounds)
        assert one.alpha[0] is not None
        assert one.alpha[0].value == pytest.approx(accepted / offered)
    assert found[0].tau.value > 3.9 and found[2].tau.value < 1.6
    assert found[1].tau.low <= found[1].tau.value <= found[1].tau.high


def test_buckets_add_up_to_the_whole(evaluation: Evaluation) -> None:
    assert sum(one.rounds for one in evaluation.by_context) == pytest.approx(evaluation.rounds)
    assert sum(one.tokens for one in evaluation.by_context) == pytest.approx(evaluation.tokens)


def test_the_table_has_a_line_per_bucket_with_counts(evaluation: Evaluation) -> None:
    table = context_table([evaluation]).splitlines()
    heading, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)
    assert heading == ["T", "context", "tau", "alpha_1", "documents", "rounds"]
    assert [row[1] for row in rows] == ["0-256", "256-512", "512-1k"]
    assert [int(row[4]) for row in rows] == [3, 2, 1]
