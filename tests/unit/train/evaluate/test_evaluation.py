"""Offline alpha and tau against rounds that are counted token by token, also by context, of a draft
whose acceptance depends on the position; `tests/integration/test_one_acceptance.py` holds them
against the engine's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from draftsmith.drafters.interface import UnrollBatch, UnrolledStep
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import bucket_of
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.command import context_table
from draftsmith.train.evaluate.teacher_forced import (
    Counts,
    DocumentCounts,
    DraftRule,
    Evaluation,
    count_documents,
    merge_documents,
    summarise,
)
from tests.table_target import TableTarget

PROMPT = [17, 40, 200, 11]


def sequence(target: Target, answer: list[int], name: str = "a") -> TokenSequence:
    ids = torch.tensor(PROMPT + answer)
    return TokenSequence(name, ids, torch.arange(len(ids)) >= len(PROMPT))


def evaluated(drafter, target: Target, answer: list[int], temperature: float, k: int) -> Evaluation:
    rule = DraftRule(temperature, k)
    return summarise(count_documents(drafter, target, [sequence(target, answer)], rule), rule)


def draft_distribution(drafter, tokens: list[int], depth: int, temperature: float) -> torch.Tensor:
    """What `TableDrafter` would draft at `depth` after `tokens`, whose last is the anchor of the
    round."""
    ids = torch.tensor([tokens + [0] * (depth + 2)])
    batch = UnrollBatch(
        input_ids=ids, attention_mask=torch.ones_like(ids), taps=None, num_steps=depth + 1
    )
    step = list(drafter.unroll(batch))[depth]
    hidden = step.hidden[0, len(tokens) - 2 + depth]
    return (hidden @ drafter.head_weight().T / temperature).double().softmax(-1)


def test_greedy_alpha_is_the_share_of_agreements(target, table_drafter):
    answer = target.answer([PROMPT], max_new_tokens=12, ignore_eos=True)[0]
    drafter = table_drafter(288)
    evaluation = evaluated(drafter, target, answer, 0.0, 2)
    tokens, position, rounds, agreed, offered = PROMPT + answer, len(PROMPT), 0, [0, 0], [0, 0]
    while position < len(tokens):
        rounds += 1
        kept = 0
        while kept < 2 and position + kept < len(tokens):
            offered[kept] += 1
            drafted = int(draft_distribution(drafter, tokens[:position], kept, 1.0).argmax())
            if drafted != tokens[position + kept]:
                break
            agreed[kept] += 1
            kept += 1
        position += kept + 1
    assert evaluation.rounds == pytest.approx(rounds)
    assert evaluation.tau.value == pytest.approx(12 / rounds)
    for estimate, kept, tried in zip(evaluation.alpha, agreed, offered):
        assert (estimate is None) == (tried == 0)
        assert estimate is None or estimate.value == pytest.approx(kept / tried)
    assert evaluation.unlikely == 0.0


def test_text_that_is_not_greedy_is_counted(target, table_drafter):
    answer = target.answer([PROMPT], max_new_tokens=12, ignore_eos=True)[0]
    answer[5] = (answer[5] + 1) % 288
    evaluation = evaluated(table_drafter(288), target, answer, 0.0, 2)
    assert evaluation.unlikely >= 1 / 12


def test_the_target_itself_is_accepted_always(target):
    class Oracle:
        taps = ()
        vocab_map = None

        def head_weight(self) -> torch.Tensor:
            return target.model.get_output_embeddings().weight

        def unroll(self, batch):
            _, hidden = target.states(batch.input_ids, batch.attention_mask, ())
            yield UnrolledStep(hidden=hidden, valid=batch.attention_mask.bool(), offset=1)

    answer = target.answer([PROMPT], max_new_tokens=12, temperature=1.0, ignore_eos=True)[0]
    evaluation = evaluated(Oracle(), target, answer, 1.0, 3)
    assert evaluation.rounds == pytest.approx(3.0, abs=1e-4)
    assert evaluation.tau.value == pytest.approx(4.0, abs=1e-3)
    assert [round(estimate.value, 4) for estimate in evaluation.alpha] == [1.0, 1.0, 1.0]


def test_a_draft_vocabulary_is_spread_over_the_targets(target, table_drafter):
    drafter = table_drafter(288)
    kept = torch.arange(0, 288, 2)
    drafter.vocab_map = kept
    drafter.head = torch.nn.Parameter(drafter.head[kept].detach())
    odd = [token | 1 for token in range(20, 32)]
    evaluation = evaluated(drafter, target, odd, 1.0, 2)
    assert evaluation.tau.value == pytest.approx(1.0)


def test_documents_are_resampled_whole():
    def count(name: str, tokens: int, rounds: float) -> DocumentCounts:
        whole = Counts(rounds, tokens, [rounds], [rounds / 2])
        return DocumentCounts(name, tokens, 0, {0: whole})

    merged = merge_documents([count("a", 10, 5.0), count("b", 10, 10.0), count("a", 20, 5.0)])
    found = [(entry.name, entry.tokens, entry.whole.rounds) for entry in merged]
    assert found == [("a", 30, 10.0), ("b", 10, 10.0)]
    summary = summarise(merged, DraftRule(1.0, 1))
    assert summary.tau.value == 2.0
    # Two documents: a resample is one, the other, or both.
    assert summary.tau.low == pytest.approx(1.0) and summary.tau.high == pytest.approx(3.0)


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
