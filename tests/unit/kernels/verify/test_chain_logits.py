"""Chains verified from raw logits: the tokens of the reference, of a whole round in one launch."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.verify import chain_triton
from draftsmith.kernels.verify.chain import verify_logits
from draftsmith.kernels.verify.verdict import Drafts

SIZE, DEPTH, SIZES = 50, 3, [3, 2, 3]  # of three requests with drafts; a fourth has none
DISTRIBUTIONS = {
    "mixed": {"temperature": (0.0, 0.7, 1.0, 0.0)},
    "sampled": {"temperature": (0.3, 1.0, 1.0, 1.7)},
    "greedy": {"temperature": (0.0,) * 4},
    "filtered": {
        "temperature": (0.7, 1.0, 0.0, 1.3),
        "top_k": (0, 5, 0, 0),
        "top_p": (0.9, 1.0, 0.5, 1.0),
        "min_p": (0.0, 0.0, 0.0, 0.1),
    },
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, poisoned_empty: None) -> None:
    """Four blocks, the last one with two tokens."""
    monkeypatch.setattr(chain_triton, "BLOCK", 16)


def round_of(
    seed: int, lengths: list[int], *, drawn: bool
) -> tuple[torch.Tensor, Drafts, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(sum(SIZES) + 4, SIZE, generator=generator)
    tokens = torch.randint(SIZE, (3, DEPTH), generator=generator)
    # Tokens that are likely to be kept.
    tokens[0], tokens[2] = logits[:3].argmax(-1), logits[7:10].argmax(-1)
    q_logits = logits[:9].view(3, 3, SIZE) + torch.randn(3, 3, SIZE, generator=generator)
    drafts = Drafts(tokens, torch.tensor(lengths), q_logits if drawn else None, torch.tensor(SIZES))
    seeds = torch.randint(1 << 60, (4,), generator=generator)
    return logits, drafts, seeds, torch.randint(1000, (4,), generator=generator)


def assert_equal(
    rows: SamplingRows, logits: torch.Tensor, drafts: Drafts | None, *streams: torch.Tensor
) -> list[list[int]]:
    found = verify_logits(logits, rows, drafts, *streams, impl="triton")
    assert found.tolist() == verify_logits(logits, rows, drafts, *streams, impl="torch").tolist()
    return found.tolist()


@pytest.mark.parametrize(
    "name, drawn",
    [("mixed", True), ("mixed", False), ("sampled", True), ("greedy", False), ("filtered", True)],
)
def test_one_launch_gives_the_references_tokens(
    name: str, drawn: bool, device: torch.device
) -> None:
    rows = SamplingRows.of(**DISTRIBUTIONS[name])
    kept = set()
    for seed, lengths in enumerate(([3, 2, 3], [3, 0, 1])):
        found = assert_equal(rows, *round_of(seed, lengths, drawn=drawn))
        kept |= {row[0] for row in found}
        assert all(row[0] <= most for row, most in zip(found, [*lengths, 0]))
    assert {0, 3} <= kept


def test_broken_logits_are_survived() -> None:
    rows = SamplingRows.of(**DISTRIBUTIONS["mixed"])
    for seed in range(4):
        logits, drafts, *streams = round_of(seed, [3, 2, 3], drawn=True)
        assert drafts.logits is not None
        logits[seed] = math.nan  # of the first request
        logits[4, 3], logits[5, 2], logits[8, 1:] = math.nan, math.inf, -math.inf
        drafts.logits[1, 0], drafts.logits[2, 1, 4:] = math.nan, -math.inf
        drafts.tokens[2, 2] = -1
        assert_equal(rows, logits, drafts, *streams)
    logits[:] = math.nan
    assert [row[:2] for row in assert_equal(rows, logits, drafts, *streams)] == [[0, -1]] * 4


def test_the_lowest_of_equal_logits_is_greedy() -> None:
    logits = torch.zeros(4, SIZE)
    logits[1, [17, 33, 49]], logits[2, [9, 8]], logits[3, 2] = 2.0, math.inf, -1.0
    seeds = torch.arange(4)
    found = assert_equal(SamplingRows.of([0.0] * 4), logits, None, seeds, seeds)
    assert found == [[0, 0], [0, 17], [0, 8], [0, 0]]


def test_rows_without_drafts_draw_bonus_tokens_of_their_own() -> None:
    rows = SamplingRows.of(**DISTRIBUTIONS["sampled"])
    logits, drafts, *streams = round_of(5, [3, 2, 3], drawn=True)
    together = assert_equal(rows, logits, drafts, *streams)
    last = rows.select(slice(3, 4)), None, *(stream[3:] for stream in streams)
    alone = verify_logits(logits[-1:], *last, impl="torch")
    assert together[3][:2] == alone[0].tolist()


def test_first_rows_of_many_requests_are_added_up_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_triton, "MOST_SUMMED", 3)
    assert_equal(SamplingRows.of(**DISTRIBUTIONS["mixed"]), *round_of(7, [3, 1, 3], drawn=True))


def test_more_logits_than_drafts_change_nothing() -> None:
    """Logits behind a request's drafted tokens are skipped."""
    rows = SamplingRows.of(**DISTRIBUTIONS["mixed"])
    logits, drafts, *streams = round_of(6, [1, 2, 0], drawn=True)
    wide = assert_equal(rows, logits, drafts, *streams)
    chosen = torch.tensor([0, 1, 4, 5, 6, 7, 11])
    assert (
        assert_equal(rows, logits[chosen], drafts._replace(sizes=drafts.lengths), *streams) == wide
    )
