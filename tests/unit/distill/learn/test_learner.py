"""The learner: gains on what it trains on, skips what is not finite, repeats itself exactly, keeps
a fair reservoir."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftsmith.distill.buffer.traffic import ServedText, newest_within
from draftsmith.distill.gate.scoring import score_drafters
from draftsmith.distill.learn.learner import Reservoir
from draftsmith.drafters.target.target import Target
from draftsmith.record import RecordedTaps


@pytest.fixture
def served(served_texts: Callable[[int], list[ServedText]]) -> list[ServedText]:
    return served_texts(12)


def mean_alpha(drafter: torch.nn.Module, target: Target, texts: list[ServedText]) -> float:
    return float(
        np.concatenate(
            [
                one.alpha
                for one in score_drafters([drafter], target, texts, max_depth=3, max_length=512)[0]
            ]
        ).mean()
    )


@pytest.mark.parametrize(
    ("positions", "gain"),
    # What follows a rejected token seldom comes up again in so little text.
    [(("later-rejected",), 0.002), (("bonus", "later-rejected", "accepted"), 0.05)],
)
def test_updates_raise_alpha(
    target: Target,
    new_learner: Callable,
    served: list[ServedText],
    positions: tuple[str, ...],
    gain: float,
) -> None:
    learner = new_learner(lr=2e-2, steps=25, positions=positions)
    before = mean_alpha(learner.drafter, target, served)
    report = learner.update(served)
    assert report.broken == 0 and report.tokens > 0 and np.isfinite(report.loss)
    assert mean_alpha(learner.drafter, target, served) > before + gain


def test_updates_follow_the_chosen_divergence(
    target: Target, bigram: Callable, new_learner: Callable, served: list[ServedText]
) -> None:
    alphas, positions = {}, ("accepted", "first-rejected")
    for divergence in ("forward-kl", "lk-alpha"):
        learner = new_learner(lr=2e-2, steps=25, positions=positions, divergence=divergence)
        learner.update(served)
        alphas[divergence] = mean_alpha(learner.drafter, target, served)
    assert alphas["lk-alpha"] > mean_alpha(bigram(288), target, served) + 0.05
    assert alphas["lk-alpha"] != alphas["forward-kl"]


def test_positions_without_weight_change_nothing(
    new_learner: Callable, served: list[ServedText]
) -> None:
    """Only accepted positions are asked for, and nothing was accepted."""
    rejected = [
        ServedText(
            text.records, text.tokens, np.where(text.roles == 1, 2, text.roles).astype(np.int8)
        )
        for text in served[:4]
    ]
    learner = new_learner(positions=("accepted",))
    before = {name: value.clone() for name, value in learner.drafter.state_dict().items()}
    report = learner.update(rejected)
    assert (report.tokens, report.loss, report.alpha) == (0, None, [])
    after = learner.drafter.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_nan_gradients_are_skipped_and_end_the_update(
    new_learner: Callable, bigram: Callable, served: list[ServedText]
) -> None:
    drafter = bigram(288)
    with torch.no_grad():
        drafter.states.weight.fill_(float("nan"))
    before = drafter.head.detach().clone()
    report = new_learner(drafter, steps=10).update(served)
    assert report.broken == 3 and torch.equal(drafter.head, before)


def test_reservoir_is_a_fair_sample_without_distributions(served: list[ServedText]) -> None:
    rng = random.Random(0)
    counts = np.zeros(len(served))
    for _ in range(200):
        reservoir = Reservoir(4)
        for text in served:
            reservoir.add(text, rng)
        assert len(reservoir.texts) == 4 and reservoir.seen == len(served)
        for text in reservoir.texts:
            counts[[one.request for one in served].index(text.request)] += 1
    expected = 200 * 4 / len(served)
    # 12 cells of a binomial with variance np(1-p); 5 standard deviations.
    assert np.abs(counts - expected).max() < 5 * np.sqrt(200 * (1 / 3) * (2 / 3))
    assert all(not record.p and not record.q for text in reservoir.texts for record in text.records)


def test_states_of_the_texts_kept_stay_within_their_bytes(served: list[ServedText]) -> None:
    def tapped(text: ServedText, rows: int) -> ServedText:
        values = np.zeros((rows, 8), dtype=np.uint16)
        first = replace(text.records[0], taps=RecordedTaps((1,), 0, values))
        return replace(text, records=[first, *text.records[1:]])

    rng = random.Random(0)
    texts = [tapped(one, 2 + number % 3) for number, one in enumerate(served)]
    reservoir = Reservoir(8, keeps_p=True, tap_bytes=160)
    for text in texts:
        reservoir.add(text, rng)
        assert 0 < sum(one.tap_bytes for one in reservoir.texts) <= 160
    assert len(reservoir.texts) >= 2
    reservoir.arrived(texts)
    assert [one.request for one in reservoir.latest] == [one.request for one in texts[-3:]]
    assert newest_within(texts, 31) == [] and newest_within(served, 0) == served
