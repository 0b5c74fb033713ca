from __future__ import annotations

import math

import pytest
import torch

from draftsmith.kernels.acceptance import overlap, probabilities
from draftsmith.kernels.sampling.top_tokens import top_overlap, top_probs


def logits_of(seed: int, *, rows: int = 20, num_tokens: int = 300) -> torch.Tensor:
    return 3 * torch.randn(rows, num_tokens, generator=torch.Generator().manual_seed(seed))


# the larger ones are searched by groups, the last with a rest
@pytest.mark.parametrize("num_tokens", [300, 1280, 4001])
def test_a_top_distribution_holds_the_likeliest_and_all_mass(num_tokens: int) -> None:
    logits = logits_of(0, num_tokens=num_tokens)
    distribution = top_probs(logits, k=10)
    probs = logits.softmax(-1)
    assert torch.equal(distribution.ids, probs.topk(10, dim=-1).indices)
    torch.testing.assert_close(distribution.logprobs.exp(), probs.gather(-1, distribution.ids))
    torch.testing.assert_close(
        distribution.logprobs.exp().sum(-1) + distribution.tail, torch.ones(20)
    )
    assert (distribution.tail > 0.01).any(), "the case must have a tail"


def test_a_small_vocabulary_is_kept_whole() -> None:
    distribution = top_probs(logits_of(1, num_tokens=7))
    assert distribution.ids.shape == (20, 7)
    assert distribution.tail.max() < 1e-6


@pytest.mark.parametrize("k", [1, 10, 64])
def test_overlap_bounds_hold_the_overlap(k: int) -> None:
    p, q = logits_of(2), logits_of(2) + 0.5 * logits_of(3)
    low, high = top_overlap(top_probs(p, k=k), probabilities(q))
    exact = overlap(p, q)
    assert (low <= exact + 1e-6).all() and (exact <= high + 1e-6).all()
    assert (high - low).mean() < 1 - exact.mean() or k < 64


@pytest.mark.parametrize("num_tokens", [300, 4001])
def test_a_distribution_of_fewer_tokens_than_are_kept_is_kept_whole(num_tokens: int) -> None:
    logits = torch.full((1, num_tokens), -math.inf)
    logits[0, [0, 7, num_tokens - 1]] = torch.tensor([0.0, 2.0, 1.0])
    distribution = top_probs(logits, k=10)
    assert (
        distribution.ids[0, :3].tolist() == [7, num_tokens - 1, 0]
        and len(set(distribution.ids[0].tolist())) == 10
    )
    assert distribution.logprobs[0, 3:].isneginf().all() and float(distribution.tail) < 1e-6


def test_overlap_bounds_meet_on_the_whole_distribution() -> None:
    p, q = logits_of(4), logits_of(5)
    q[:, :50] = -math.inf
    low, high = top_overlap(top_probs(p, k=300), probabilities(q))
    torch.testing.assert_close(low, overlap(p, q), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(high, low, rtol=1e-5, atol=1e-6)


# as few as are searched at once, two levels of groups, three with a rest at each
@pytest.mark.parametrize("num_tokens", [1023, 1024, 4096, 32_007])
def test_the_recorded_number_of_tokens_is_found_exactly(num_tokens: int) -> None:
    logits = logits_of(6, rows=6, num_tokens=num_tokens)
    logits[0] = logits[0].sort().values
    logits[1] = logits[1].sort(descending=True).values
    logits[2] = logits[2].bfloat16().float()  # many are equal
    logits[3, 8:] = -math.inf
    found = top_probs(logits)
    expected = torch.log_softmax(logits, dim=-1).topk(64).values
    assert torch.equal(found.logprobs, expected)
    assert all(len(set(row)) == 64 for row in found.ids.tolist())
