"""The loss of a draft's guess of its own alpha, by hand; and the figure that says how far off its
guesses are."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.blocks.dspark import Dspark
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import DsparkOptions
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.estimate import Reliability
from draftsmith.train.evaluate.teacher_forced import evaluate_draft
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


def test_calibration_error_is_the_mean_distance_over_bins():
    guesses = torch.tensor([0.05, 0.05, 0.65, 0.65, 1.0])
    alpha = torch.tensor([0.0, 0.1, 0.5, 0.4, 1.0])
    # Bin 0: 0.05 against 0.05; bin 6: 0.65 against 0.45; bin 9: 1 against 1.
    assert Reliability.of(guesses, alpha).error == pytest.approx(0.4 / 5)
    halves = Reliability.of(guesses[:2], alpha[:2]).plus(Reliability.of(guesses[2:], alpha[2:]))
    assert halves.error == pytest.approx(0.4 / 5)


def test_training_the_head_calibrates_it_and_a_shifted_head_is_seen(drafter, target):
    """The head alone is trained, on the very text it is judged by: what is tested is that loss and
    figure speak of the same."""
    generator = torch.Generator().manual_seed(3)
    sequences = [
        TokenSequence(
            f"{number}", torch.randint(3, 288, (16,), generator=generator), torch.arange(16) >= 2
        )
        for number in range(4)
    ]
    ids = torch.stack([sequence.input_ids for sequence in sequences])
    weights = torch.stack([sequence.loss_mask for sequence in sequences]).double()
    batch = TextBatch(input_ids=ids, attention_mask=torch.ones_like(ids), weights=weights)
    optimizer = torch.optim.Adam(drafter.confidence_head.parameters(), lr=0.1)

    def error() -> float:
        found = evaluate_draft(drafter, target, sequences, temperature=1.0, k=STEPS).calibration
        assert found is not None
        return found

    before = error()
    for _ in range(30):
        optimizer.zero_grad()
        unrolled_loss(
            drafter, LiveSource(target), batch, num_steps=STEPS, decay=1.0
        ).total.backward()
        optimizer.step()
    after = error()
    assert after < 0.05 and after < 0.3 * before
    drafter.confidence_head.proj.bias.data += 2.0
    assert error() > 2 * after
