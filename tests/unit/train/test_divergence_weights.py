"""Token mean and sample mean."""

from __future__ import annotations

import torch

from draftsmith.train.trainer import sample_mean, token_mean

WEIGHTS = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_means_are_means() -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0, 4.0], [9.0, 10.0, 9.0, 9.0], [7.0, 7.0, 7.0, 7.0]])
    assert torch.isclose((token_mean(WEIGHTS) * losses).sum(), torch.tensor((10 + 20) / 6))
    assert torch.isclose((sample_mean(WEIGHTS) * losses).sum(), torch.tensor((2.5 + 10) / 2))


def test_nothing_to_average_is_zero() -> None:
    nothing = torch.zeros(2, 3)
    assert torch.equal(token_mean(nothing), nothing) and torch.equal(sample_mean(nothing), nothing)
