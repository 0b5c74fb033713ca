"""What a candidate is besides its gradient: the weight of each depth, the mean of its weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import LearnUnroll


@pytest.fixture
def served(served_texts: Callable[[int], list[ServedText]]) -> list[ServedText]:
    return served_texts(6)


def test_depths_are_weighted_as_in_training(
    new_learner: Callable, served: list[ServedText]
) -> None:
    heads = []
    for decay in (0.5, 0.9, 1.0):
        learner = new_learner(lr=1e-2, steps=3, unroll=LearnUnroll(steps=3, decay=decay))
        assert learner.update(served).broken == 0
        heads.append(learner.drafter.head)
    assert all(
        not torch.equal(one, two) for index, one in enumerate(heads) for two in heads[:index]
    )


def test_a_rest_after_every_step_changes_nothing_that_is_learned(
    new_learner: Callable, served: list[ServedText]
) -> None:
    spent_s: list[float] = []
    resting, other = (new_learner(lr=2e-2, steps=10, warmup_steps=1) for _ in range(2))
    resting.update(served, spent_s.append)
    other.update(served)
    assert len(spent_s) == 10 and all(seconds > 0 for seconds in spent_s)
    assert torch.equal(resting.drafter.head, other.drafter.head)


def test_what_is_judged_is_the_mean_of_the_weights_and_training_goes_on_from_themselves(
    new_learner: Callable, bigram: Callable, served: list[ServedText]
) -> None:
    learner, again = (new_learner(lr=2e-2, steps=1, warmup_steps=1) for _ in range(2))
    mean = torch.zeros(0)
    for step in range(1, 13):
        learner.update(served)
        again.update(served)
        weights = learner.drafter.head.detach().clone()
        decay = min(0.96, (1 + step) / (10 + step))
        mean = weights if step == 1 else decay * mean + (1 - decay) * weights
        with learner.averaged() as judged:
            torch.testing.assert_close(judged.head.detach(), mean, rtol=1e-5, atol=1e-6)
        # Nobody looked at the other one.
        assert torch.equal(learner.drafter.head, weights)
        assert torch.equal(again.drafter.head, weights)
    assert not torch.equal(mean, weights)
    learner.restart(bigram(288).state_dict())
    with learner.averaged() as judged:
        assert torch.equal(judged.head, bigram(288).head)


def test_without_a_mean_the_last_weights_are_judged(
    new_learner: Callable, served: list[ServedText]
) -> None:
    learner = new_learner(lr=2e-2, steps=4, warmup_steps=1, average=0.0)
    learner.update(served)
    weights = learner.drafter.head.detach().clone()
    with learner.averaged() as judged:
        assert torch.equal(judged.head, weights)
