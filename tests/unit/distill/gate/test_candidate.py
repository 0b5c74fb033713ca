"""What a candidate is besides its gradient: adapters on the live draft, the pull towards it, the
weight of each depth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.learn.learner import Learner
from draftsmith.drafters import checkpoint
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import DraftLmOptions, LoraOptions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.config import WEIGHTS

ADAPTERS = LearnConfig(
    lr=1e-2, steps=4, batch=4, unroll=LearnUnroll(steps=1), lora=LoraOptions(rank=2)
)
IDS = torch.randint(3, 288, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def served(served_texts: Callable[[int], list[ServedText]]) -> list[ServedText]:
    return served_texts(6)


def language_model(target: Target) -> DraftLm:
    return DraftLm.create(DraftLmOptions(num_layers=1, hidden_size=32), target, seed=0).eval()


@torch.no_grad()
def logits(drafter: DraftLm) -> torch.Tensor:
    return drafter.lm.head(drafter.lm.full(IDS).final)


def test_adapters_alone_are_trained_and_published_merged(
    target: Target, served: list[ServedText], tmp_path: Path
) -> None:
    live = language_model(target)
    weights = {name: value.clone() for name, value in live.state_dict().items()}
    learner = Learner(live, target, ADAPTERS, seed=0)
    torch.testing.assert_close(
        logits(learner.drafter), logits(language_model(target)), rtol=0, atol=0
    )
    learner.update(served)
    moved = logits(learner.drafter)
    assert (moved - logits(language_model(target))).abs().max() > 1e-3
    own = learner.drafter.state_dict()
    for name, value in weights.items():
        module, _, leaf = name.rpartition(".")
        assert torch.equal(value, own[name if name in own else f"{module}.base_layer.{leaf}"])
    checkpoint.save(learner.drafter, tmp_path, target)
    published = checkpoint.load(tmp_path, target)
    torch.testing.assert_close(logits(published), moved, rtol=1e-4, atol=1e-5)
    # The published one is live: the candidate is the same draft, of which the adapters are no part
    # any more.
    learner.live_changed(published.state_dict())
    torch.testing.assert_close(logits(learner.drafter), logits(published), rtol=0, atol=0)
    assert learner.steps == 0 and not learner.moments()
    learner.update(served)
    assert not torch.equal(logits(learner.drafter), logits(published))


def test_adapters_begin_alike_for_the_same_seed_whatever_was_drawn_before(
    target: Target, served: list[ServedText]
) -> None:
    found = []
    for other in (1, 2):
        torch.manual_seed(other)
        learner = Learner(language_model(target), target, ADAPTERS, seed=0)
        learner.update(served)
        found.append(logits(learner.drafter))
    assert torch.equal(*found)


def test_adapters_are_refused_where_they_cannot_be(target: Target, bigram: Callable) -> None:
    with pytest.raises(UserError, match="family 'bigram'"):
        Learner(bigram(288), target, ADAPTERS, seed=0)


def distance(drafter: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(drafter.parameters(), other.parameters(), strict=True)
    return float(sum(((one - two) ** 2).sum() for one, two in pairs).detach().sqrt())


def trained(
    target: Target, bigram: Callable, served: list[ServedText], **changes: float
) -> Learner:
    learner = Learner(
        bigram(288),
        target,
        LearnConfig(lr=2e-2, steps=10, warmup_steps=1, unroll=LearnUnroll(steps=1), **changes),
        seed=0,
    )
    learner.update(served)
    return learner


def test_the_pull_holds_a_candidate_close_to_the_live_version(
    target: Target, bigram: Callable, served: list[ServedText]
) -> None:
    free, held, tied = (
        trained(target, bigram, served, proximal=pull) for pull in (0.0, 10.0, 50.0)
    )
    # At 50 a step of lr 2e-2 goes all the way back.
    assert 0 < distance(held.drafter, bigram(288)) < 0.8 * distance(free.drafter, bigram(288))
    assert distance(tied.drafter, bigram(288)) < 1e-6 and not free.anchor
    other = bigram(288, seed=3)
    tied.live_changed(other.state_dict())
    tied.update(served)
    assert distance(tied.drafter, other) < 1e-6


def test_depths_are_weighted_as_in_training(
    target: Target, bigram: Callable, served: list[ServedText]
) -> None:
    heads = []
    for weights in WEIGHTS:
        learner = Learner(
            bigram(288),
            target,
            LearnConfig(lr=1e-2, steps=3, unroll=LearnUnroll(steps=3, weights=weights)),
            seed=0,
        )
        assert learner.update(served).broken == 0
        heads.append(learner.drafter.head)
    assert all(
        not torch.equal(one, two) for index, one in enumerate(heads) for two in heads[:index]
    )


def test_a_rest_after_every_step_changes_nothing_that_is_learned(
    target: Target, bigram: Callable, served: list[ServedText]
) -> None:
    spent_s: list[float] = []
    learner = Learner(
        bigram(288),
        target,
        LearnConfig(lr=2e-2, steps=10, warmup_steps=1, unroll=LearnUnroll(steps=1)),
        seed=0,
    )
    learner.update(served, spent_s.append)
    assert len(spent_s) == 10 and all(seconds > 0 for seconds in spent_s)
    assert torch.equal(learner.drafter.head, trained(target, bigram, served).drafter.head)


@pytest.mark.parametrize(
    "changes", [{"proximal": -1.0}, {"proximal": float("inf")}, {"budget": 0.0}, {"budget": 1.5}]
)
def test_bad_options_are_one_sentence(target: Target, bigram: Callable, changes: dict) -> None:
    with pytest.raises(UserError, match=r"learn\."):
        Learner(bigram(288), target, LearnConfig(**changes), seed=0)


def test_what_is_judged_is_the_mean_of_the_weights_and_training_goes_on_from_themselves(
    target: Target, bigram: Callable, served: list[ServedText]
) -> None:
    learner, again = (
        Learner(bigram(288), target, LearnConfig(lr=2e-2, steps=1, warmup_steps=1), seed=0)
        for _ in range(2)
    )
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
        assert torch.equal(learner.drafter.head, weights) and torch.equal(
            again.drafter.head, weights
        )
    assert not torch.equal(mean, weights)
    learner.restart(bigram(288).state_dict())
    with learner.averaged() as judged:
        assert torch.equal(judged.head, bigram(288).head)


def test_without_a_mean_the_last_weights_are_judged(
    target: Target, bigram: Callable, served: list[ServedText]
) -> None:
    learner = Learner(
        bigram(288), target, LearnConfig(lr=2e-2, steps=4, warmup_steps=1, average=0.0), seed=0
    )
    learner.update(served)
    weights = learner.drafter.head.detach().clone()
    with learner.averaged() as judged:
        assert torch.equal(judged.head, weights)
