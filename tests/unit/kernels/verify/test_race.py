"""Races decided by bounds of times: the winner and its score are those of all logarithms, bit for
bit; and what is drawn where nothing of a residual is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from draftsmith.kernels.sampling.random_streams import GOLDEN, token_noise
from draftsmith.kernels.sampling.random_streams_triton import log_noise
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.race_triton import MOST_GAP, SLACK, advance, lead
from draftsmith.kernels.verify.verdict import Verdict

SIZE, TILE = 1024, 512


@triton.jit
def _races(
    logits,  # [N, SIZE] float32
    keys,  # [N] int64
    gaps,  # [N] float32, of the reference above the largest logit
    tokens,  # [N, 2] int32, written: by bounds, by all logarithms
    scores,  # [N, 2] float32, written
    contested,  # [N] int32, written
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SLACK: tl.constexpr,
):
    row = tl.program_id(0)
    key = tl.load(keys + row)
    columns = tl.arange(0, SIZE)
    x = tl.load(logits + row * SIZE + columns)
    top = tl.max(x, axis=0)
    best, at = tl.max((x - top) - log_noise(key, columns), axis=0, return_indices=True)
    tl.store(scores + row * 2 + 1, best)
    tl.store(tokens + row * 2 + 1, at)
    reference = top + tl.load(gaps + row)
    lanes = tl.arange(0, TILE)
    nothing = tl.full([TILE], float("-inf"), tl.float32)
    leaders = nothing, -nothing, lanes, nothing, -nothing
    for start in range(0, SIZE, TILE):
        x = tl.load(logits + row * SIZE + start + lanes)
        leaders = advance(leaders, x, start + lanes, key, reference)
    found, token, best, is_contested = lead(leaders, lanes, key, reference, SLACK)
    tl.store(scores + row * 2, tl.where(found == top, best, float("nan")))
    tl.store(tokens + row * 2, token)
    tl.store(contested + row, is_contested.to(tl.int32))


class Found(NamedTuple):
    wrong: torch.Tensor  # [N] bool: neither contested nor as by all logarithms
    contested: torch.Tensor  # [N] bool


def race(
    logits: torch.Tensor, keys: torch.Tensor, gap: float = 0.0, slack: float = SLACK.value
) -> Found:
    count, device = len(keys), "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.zeros(count, 2, dtype=torch.int32, device=device)
    scores = torch.zeros(count, 2, device=device)
    contested = torch.zeros(count, dtype=torch.int32, device=device)
    gaps = torch.full((count,), gap, device=device)
    _races[(count,)](
        logits.to(device), keys.to(device), gaps, tokens, scores, contested, SIZE, TILE, slack
    )
    bits = scores.view(torch.int32)
    alike = (tokens[:, 0] == tokens[:, 1]) & (bits[:, 0] == bits[:, 1])
    return Found((~alike & (contested == 0)).cpu(), contested.bool().cpu())


def keys_of(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator)


def near_ties(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in which the two tokens with the least noise arrive within a rounding or two of each
    other: there a bound is as near to its time as a rounding is."""
    keys = keys_of(count)
    noise = token_noise(keys[:, None], torch.arange(1, SIZE + 1) * GOLDEN, torch.float32)
    low = noise.topk(2, largest=False)
    generator = torch.Generator().manual_seed(1)
    ulps = torch.randint(-1, 2, low.values.shape, generator=generator) * 2.0**-22
    logits = torch.full((count, SIZE), -40.0)
    return logits.scatter_(1, low.indices, low.values + ulps), keys


KINDS = {
    "normal": lambda: 3 * torch.randn(10, SIZE, generator=torch.Generator().manual_seed(2)),
    "peaked": lambda: 20 * torch.randn(10, SIZE, generator=torch.Generator().manual_seed(3)),
    "flat": lambda: torch.zeros(10, SIZE),
    "equal logits": lambda: torch.randn(
        10, SIZE, generator=torch.Generator().manual_seed(4)
    ).round(),
    "huge": lambda: 1e30 * torch.randn(10, SIZE, generator=torch.Generator().manual_seed(5)),
    "one token": lambda: torch.full((8, SIZE), -math.inf).fill_diagonal_(-3.0),
}


@pytest.mark.parametrize("gap", [0.0, 39.0, 60.0])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_find_the_winner_of_all_logarithms(kind: str, gap: float) -> None:
    """With a reference at the largest logit and above it."""
    logits = KINDS[kind]()
    found = race(logits, keys_of(len(logits)), gap)
    assert not found.wrong.any()
    if gap > MOST_GAP.value and kind != "huge":
        assert found.contested.all()
    else:
        assert found.contested.float().mean() < 0.4


def test_near_ties_are_left_to_the_logarithms() -> None:
    """Negative controls: without slack, and with less than none, winners are lost."""
    logits, keys = near_ties(32)
    found = race(logits, keys)
    assert not found.wrong.any() and found.contested.all()
    assert race(logits, keys, slack=1.0).wrong.any()
    assert race(logits, keys, slack=1 - 2.0**-10).wrong.float().mean() > 0.1


@pytest.mark.parametrize("verify", [verify_chain, verify_block], ids=["chain", "block"])
def test_a_residual_without_mass_falls_back_to_p(
    verify: Callable[..., Verdict], poisoned_empty: None
) -> None:
    """q exceeds p at a token too rare to change the sum of either."""
    count, size = 4, 5000
    p = torch.full((2, size), -math.inf)
    p[:, 4100], p[:, 4999] = 0.0, -18.0
    q = p.clone()
    q[:, 4999] = -17.0
    everyone, drafts = torch.arange(count), torch.full((count, 1), 4999)
    arguments = p.repeat(count, 1), drafts, torch.ones_like(everyone), q[:1].expand(count, 1, size)
    expected = verify(*arguments, everyone, everyone, impl="torch")
    found = verify(*arguments, everyone, everyone, impl="triton")
    assert torch.equal(found.tokens, expected.tokens)
    assert (found.tokens[found.accepted == 0, 0] == 4100).any()
