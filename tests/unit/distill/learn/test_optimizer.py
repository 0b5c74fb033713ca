"""The gradient of a batch: the mean over its tokens, however its rows are parted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.learn.optimizer import CandidateOptimizer
from draftsmith.distill.learn.teachers import Batch, LearningRow, LiveTeacher
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.roles import Row


def gradient(optimizer: CandidateOptimizer, batch: Batch) -> list[torch.Tensor]:
    optimizer.drafter.zero_grad()
    optimizer._backward(batch)
    return [parameter.grad.clone() for parameter in optimizer.drafter.parameters()]


def test_the_gradient_is_the_mean_over_the_weight_of_the_rows(
    target: Target, bigram: Callable
) -> None:
    chance = np.random.default_rng(0)
    rows = [
        Row(chance.integers(3, 288, size).tolist(), chance.random(size, dtype=np.float32))
        for size in (5, 17, 9, 12, 30)
    ]
    optimizer = CandidateOptimizer(bigram(288).double(), LearnConfig(unroll=LearnUnroll(steps=1)))

    def batch(some: list[Row]) -> Batch:
        return LiveTeacher(target).batch([LearningRow(row, []) for row in some])

    whole = gradient(optimizer, batch(rows))
    parts = [batch(some) for some in (rows[:2], rows[2:3], rows[3:])]
    shares = [part.weight / batch(rows).weight for part in parts]
    alone = [gradient(optimizer, part) for part in parts]
    for index, expected in enumerate(whole):
        mean = sum(share * one[index] for share, one in zip(shares, alone, strict=True))
        # The target's distributions are float32 of differently padded batches.
        torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-7)
    # Negative control: without the weights of the parts the mean is another.
    even = sum(one[0] / len(parts) for one in alone)
    assert not torch.allclose(even, whole[0], rtol=1e-2)
