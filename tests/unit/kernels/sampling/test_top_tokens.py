from __future__ import annotations

import math

import pytest
import torch

from draftsmith.kernels.overlap import overlap, probabilities
from draftsmith.kernels.sampling.top_tokens import top_overlap, top_probs
from draftsmith.kernels.sampling.vocabulary import check_sampled_head, scatter_to_target_vocab


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


# Vocabularies


V = 11
MAP = torch.tensor([7, 0, 10, 3, 4])


def by_loop(
    logits: torch.Tensor, vocab_map: torch.Tensor | None, vocab_size: int, fill: float
) -> torch.Tensor:
    rows = []
    for row in logits.reshape(-1, logits.shape[-1]).tolist():
        full = [fill] * vocab_size
        for column, value in enumerate(row):
            token = column if vocab_map is None else int(vocab_map[column])
            if token < vocab_size:
                full[token] = value
        rows.append(full)
    return torch.tensor(rows, dtype=logits.dtype).reshape(*logits.shape[:-1], vocab_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("fill", [-math.inf, 0.0])
@pytest.mark.parametrize(
    ("size", "vocab_map"),
    [(len(MAP), MAP), (V, None), (V + 5, None), (V - 4, None)],
    ids=["map", "same ids", "padded head", "smaller head"],
)
def test_every_column_lands_at_its_token(size, vocab_map, fill, shape, dtype):
    logits = torch.randn(*shape, size, dtype=dtype, generator=torch.Generator().manual_seed(0))
    found = scatter_to_target_vocab(logits, vocab_map, V, fill=fill)
    expected = by_loop(logits, vocab_map, V, fill)
    assert found.dtype == dtype and torch.equal(found, expected)


def test_gradients_flow_to_the_columns_that_have_a_token():
    logits = torch.randn(2, V + 3, requires_grad=True)
    scatter_to_target_vocab(logits, None, V).sum().backward()
    assert torch.equal(logits.grad, torch.tensor([[1.0] * V + [0.0] * 3] * 2))


def test_a_map_of_another_size_is_refused():
    with pytest.raises(IndexError):
        scatter_to_target_vocab(torch.zeros(2, len(MAP) + 1), MAP, V)


def test_a_head_that_would_lose_drawn_tokens_is_not_sampled() -> None:
    with pytest.raises(ValueError, match="9 columns is sampled for a vocabulary of 8"):
        check_sampled_head(torch.zeros(2, 9), None, 8)
    check_sampled_head(torch.zeros(2, 8), None, 8)
    check_sampled_head(torch.zeros(2, 9), torch.arange(9), 12)
