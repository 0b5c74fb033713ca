"""How much of the wall time learning takes. It computes, then rests in proportion, step by step, so that a server on the same
device waits for a step at most; where the server's latency is watched, it gives way while that is too high. How long work is
rested for goes by the share while it rests: when the server has time again, so has the learner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

# A longer rest is taken in pieces, between which somebody looks up.
MOST_REST_S = 5.0


class Guard(Protocol):
    def share(self) -> float:
        """Of its budget that learning may take now, above 0 and at most 1."""
        ...


class NoGuard:
    def share(self) -> float:
        return 1.0


def nothing() -> None:
    """There is nothing to look up for."""


class Throttle:
    """`budget` is the most of the wall time, above 0 and at most 1. `look_up` is called within long rests between steps."""

    def __init__(self, budget: float, guard: Guard, stop: threading.Event, clock: Callable[[], float] = time.perf_counter):
        self.budget, self.guard, self.stop, self.clock = budget, guard, stop, clock
        self.look_up: Callable[[], object] = nothing
        self.worked_s = self.rested_s = 0.0
        self.owed_s = 0.0  # work that is not rested for yet

    @property
    def share(self) -> float:
        return self.budget * self.guard.share()

    def rest(self, worked_s: float) -> None:
        """Between the steps of an update: until nothing is owed, or the learner is told to stop."""
        self._owe(worked_s)
        while not self.pay() and not self.stop.is_set():
            self.look_up()

    @contextmanager
    def work(self) -> Iterator[None]:
        """A piece of work that has no steps. What a single piece of rest does not pay is owed, before the next cycle's work."""
        begun_s = self.clock()
        yield
        self._owe(self.clock() - begun_s)
        self.pay()

    def _owe(self, worked_s: float) -> None:
        self.worked_s += worked_s
        self.owed_s += worked_s

    def pay(self) -> bool:
        """A piece of rest, if any is due; True once nothing is owed."""
        wanted_s = self.owed_s * (1 / self.share - 1)
        if wanted_s > 0:
            begun_s = self.clock()
            self.stop.wait(min(wanted_s, MOST_REST_S))
            self.rested_s += self.clock() - begun_s
        self.owed_s *= 1 - MOST_REST_S / wanted_s if wanted_s > MOST_REST_S else 0.0
        return self.owed_s == 0.0
