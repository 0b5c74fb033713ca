"""The loss of a draft's guess of its own alpha, by hand."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.blocks.dspark import Dspark
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import DsparkOptions
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import unrolled_loss
from tests.noise import noisy

STEPS, DECAY = 3, 0.7


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return Target.load(tiny_target("llama"), dtype=torch.float64)


@pytest.fixture
def drafter(target) -> Dspark:
    made = Dspark.create(DsparkOptions(block_size=4, markov_rank=6), target, seed=0).to(
        device=target.device, dtype=torch.float64
    )
    return noisy(made, 2)


def text() -> TextBatch:
    ids = torch.randint(3, 288, (2, 12), generator=torch.Generator().manual_seed(0))
    weights = torch.rand(2, 12, generator=torch.Generator().manual_seed(1)).double()
    weights[:, :2] = 0.0
    return TextBatch(input_ids=ids, attention_mask=torch.ones_like(ids), weights=weights)


def loss(drafter: Dspark, target: Target):
    return unrolled_loss(
        drafter,
        LiveSource(target),
        text(),
        num_steps=STEPS,
        decay=DECAY,
        kind=kind_of("forward-kl"),
    )


def test_the_loss_is_the_cross_entropy_of_guess_and_alpha(drafter, target):
    found = loss(drafter, target)
    found.total.backward()
    gradient = drafter.confidence_head.proj.bias.grad.clone()
    # A head that says nothing has a loss and a gradient that can be summed from alpha alone.
    drafter.zero_grad()
    for parameter in drafter.confidence_head.parameters():
        parameter.data.zero_()
    silent = loss(drafter, target)
    silent.total.backward()
    factors = torch.tensor([DECAY**depth for depth in range(STEPS)], dtype=torch.float64)
    divergence, weight, alpha = (
        values.double()
        for values in (silent.sums.divergence, silent.sums.weight, silent.sums.alpha)
    )
    expected = (factors * (divergence + weight * torch.log(torch.tensor(2.0)))).sum()
    torch.testing.assert_close(silent.total.detach().double(), expected, rtol=1e-5, atol=1e-5)
    expected = (factors * (0.5 * weight - alpha)).sum()
    torch.testing.assert_close(
        drafter.confidence_head.proj.bias.grad[0].double(), expected, rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(gradient, drafter.confidence_head.proj.bias.grad)


def test_alpha_is_no_way_around_the_divergence(drafter, target):
    """A guess is trained towards alpha, never alpha towards the guess: what does not feed the guess
    has the gradient it had."""
    drafter.confidence_head.proj.weight.data.zero_()
    grads = []
    for bias in (-3.0, 3.0):
        drafter.zero_grad()
        drafter.confidence_head.proj.bias.data.fill_(bias)
        loss(drafter, target).total.backward()
        grads.append(drafter.markov_head.markov_w2.weight.grad.clone())
    torch.testing.assert_close(*grads)
