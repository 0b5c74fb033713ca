"""Weights of a sample mean."""

from __future__ import annotations

import torch

from draftsmith.train.trainer import per_sample

WEIGHTS = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_every_text_with_weight_counts_alike() -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0, 4.0], [9.0, 10.0, 9.0, 9.0], [7.0, 7.0, 7.0, 7.0]])
    assert torch.isclose((per_sample(WEIGHTS) * losses).sum(), torch.tensor(2.5 + 10))


def test_nothing_to_average_is_zero() -> None:
    nothing = torch.zeros(2, 3)
    assert torch.equal(per_sample(nothing), nothing)
