"""The share of the wall time that learning takes."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest

from draftsmith.distill.throttle import MOST_REST_S, Throttle

LEAST = 1 / 64


class Time:
    """A clock and an event that passes it by waiting."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.longest_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize("budget", [1.0, 0.25])
def test_work_is_the_budgets_share_of_the_time(budget: float) -> None:
    time = Time()
    throttle = Throttle(budget, time, clock=time)  # type: ignore[arg-type]
    for worked_s in (1.0, 0.1, 3.0):
        time.now_s += worked_s
        throttle.rest(worked_s)
    with throttle.work():
        time.now_s += 2.0
    while not throttle.pay():
        pass
    assert time.longest_s <= MOST_REST_S
    assert throttle.worked_s == pytest.approx(
        6.1
    ) and throttle.worked_s / time.now_s == pytest.approx(budget)
    assert throttle.rested_s == pytest.approx(time.now_s - 6.1)


def test_within_a_long_rest_somebody_looks_up_and_work_is_owed_the_rest_of_it() -> None:
    """At a small share 26 s of scoring are owed 27 minutes."""
    time = Time()
    throttle = Throttle(LEAST, time, clock=time)  # type: ignore[arg-type]
    looked_s: list[float] = []
    throttle.look_up = lambda: looked_s.append(time.now_s)
    with throttle.work():
        time.now_s += 26.0
    assert throttle.rested_s == MOST_REST_S and throttle.owed_s > 25 and not looked_s
    time.now_s += 1.0
    throttle.rest(1.0)
    assert throttle.worked_s / time.now_s == pytest.approx(LEAST) and throttle.owed_s == 0
    assert max(b - a for a, b in pairwise(looked_s)) <= MOST_REST_S and len(looked_s) > 300


def test_long_work_without_a_rest_is_looked_up_from_too() -> None:
    """A step of 2 s on a busy machine: nobody would see for minutes whether it goes on."""
    time, looked_s = Time(), []
    throttle = Throttle(1.0, time, clock=time)  # type: ignore[arg-type]
    throttle.look_up = lambda: looked_s.append(throttle.worked_s)
    for _ in range(7):
        throttle.rest(2.0)
    assert looked_s == [6.0, 12.0] and throttle.rested_s == 0


def test_a_rest_ends_when_the_learner_is_to_stop() -> None:
    stop = threading.Event()
    stop.set()
    throttle = Throttle(1e-6, stop)
    throttle.rest(10.0)
    assert throttle.rested_s < 1.0
