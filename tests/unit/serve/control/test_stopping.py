"""The stop rule of one request against made-up drafts: how long rounds take and which drafts
survive is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from draftsmith.serve.control.stopping import FEWEST, LONGEST, SHORTEST, TRIAL, Stopping

BELOW = 0.3  # of a drafting round that takes 1.3 times the time of another


def speed(alpha: Callable[[int], float], *, rule: bool, num_tokens: int = 400) -> float:
    """Tokens per pass without drafts, the mean of many answers; `alpha` by position."""
    tokens = seconds = 0.0
    for seed in range(60):
        chance, stopping, position = random.Random(seed), Stopping(BELOW), 0
        while position < num_tokens:
            drafts, accepted = stopping.drafts or not rule, 0
            while drafts and accepted < 4 and chance.random() < alpha(position):
                accepted += 1
            stopping.observe(4 if drafts else 0, accepted)
            position += 1 + accepted
            seconds += 1.0 + BELOW * drafts
        tokens += position
    return tokens / seconds


@pytest.mark.parametrize(
    ("alpha", "least"),
    [
        (lambda position: 0.02, 1.2),
        (lambda position: 0.1, 1.1),
        (lambda position: 0.6, 0.99),  # what pays is left alone
        (lambda position: 0.75 if position < 200 else 0.05, 1.08),
        (lambda position: 0.05 if position < 200 else 0.75, 1.0),
    ],
    ids=["never kept", "seldom kept", "often kept", "worse later", "better later"],
)
def test_a_request_is_as_fast_as_with_drafts_or_faster(
    alpha: Callable[[int], float], least: float
) -> None:
    assert speed(alpha, rule=True) >= least * speed(alpha, rule=False)


def test_a_request_whose_drafts_are_never_kept_loses_next_to_nothing() -> None:
    assert speed(lambda position: 0.0, rule=True) > 0.97


def passes(stopping: Stopping, accepted: int, count: int) -> list[bool]:
    """Which of `count` passes drafted."""
    drafted = []
    for _ in range(count):
        drafted.append(stopping.drafts)
        stopping.observe(3 if stopping.drafts else 0, accepted if stopping.drafts else 0)
    return drafted


def runs(drafted: list[bool]) -> list[int]:
    """Lengths of the stretches of equal passes."""
    lengths = [0]
    for index, drafts in enumerate(drafted):
        if index and drafts != drafted[index - 1]:
            lengths.append(0)
        lengths[-1] += 1
    return lengths


def test_trials_grow_rare_and_no_rarer_than_the_longest_pause() -> None:
    stopping = Stopping(BELOW)
    found = runs(passes(stopping, 0, 1500))[:-1]
    assert found[0] == FEWEST and set(found[2::2]) == {TRIAL}
    assert found[1::2][:5] == [SHORTEST, 32, 64, 128, LONGEST] and max(found) == LONGEST
    assert stopping.num_stops == 1
    assert max(runs(passes(Stopping(BELOW, longest=20), 0, 400))) == 20


def test_a_trial_that_is_kept_resumes_and_one_that_is_barely_kept_does_not() -> None:
    def after(accepted: list[int]) -> bool:
        stopping = Stopping(1.0)
        passes(stopping, 0, FEWEST + SHORTEST)
        for count in accepted:
            assert stopping.drafts
            stopping.observe(3, count)
        return stopping.stopped

    assert after([1, 1, 1, 1]) and not after([1, 1, 1, 2])


def test_rounds_without_drafts_of_the_controls_choice_say_nothing() -> None:
    stopping = Stopping(BELOW)
    for _ in range(50):
        assert not stopping.observe(0, 0)
    assert stopping.drafts and not stopping.stopped


def test_a_restart_drafts_at_once() -> None:
    stopping = Stopping(BELOW)
    passes(stopping, 0, FEWEST + 3)
    assert stopping.stopped and not stopping.drafts
    stopping.restart()
    assert stopping.drafts and not stopping.stopped
    assert runs(passes(stopping, 0, FEWEST + 2)) == [FEWEST, 2]
