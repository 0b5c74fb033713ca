"""The gradient of a batch is the sum of what its shares add, however many ranks there are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.gradients import OwnGradients, total_weight
from draftsmith.distill.learn.shares import parts_of
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.roles import Row


@pytest.mark.parametrize("size", [2, 3, 7], ids="{} ranks".format)
def test_shares_add_up_to_the_batch(target: Target, bigram: Callable, size: int) -> None:
    chance = np.random.default_rng(0)
    lengths = (5, 17, 9, 12, 30)
    rows = [
        Row(chance.integers(3, 288, n).tolist(), chance.random(n, dtype=np.float32))
        for n in lengths
    ]
    drafter, own = bigram(288).double(), OwnGradients(target, LearnConfig(unroll=1))
    whole = own.add(drafter, rows)
    expected = [parameter.grad.clone() for parameter in drafter.parameters()]
    drafter.zero_grad()
    shares = [own.add_share(drafter, part, total_weight(rows)) for part in parts_of(rows, size)]
    for parameter, gradient in zip(drafter.parameters(), expected, strict=True):
        # The target's distributions are float32 of differently padded batches.
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)
    for name in whole._fields:
        torch.testing.assert_close(
            sum(getattr(one, name) for one in shares), getattr(whole, name), rtol=1e-5, atol=1e-6
        )
    # Negative control: a rank that forgot what the batch weighs would be noticed.
    drafter.zero_grad()
    for part in parts_of(rows, size)[:2]:
        own.add(drafter, part)
    assert not torch.allclose(next(drafter.parameters()).grad, expected[0], rtol=1e-2)
