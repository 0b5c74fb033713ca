"""Draft logits over the target's vocabulary against a plain loop over their columns."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.kernels.sampling.vocabulary import check_sampled_head, scatter_to_target_vocab

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
