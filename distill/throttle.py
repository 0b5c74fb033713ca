"""How much of the wall time learning takes. It computes, then rests in proportion, step by step, so that a server on the same
device waits for a step at most; where the server's latency is watched, it gives way while that is too high.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Guard(Protocol):
    def share(self) -> float:
        """Of its budget that learning may take now, above 0 and at most 1."""
        ...


class NoGuard:
    def share(self) -> float:
        return 1.0


class Throttle:
    """`budget` is the most of the wall time, above 0 and at most 1."""

    def __init__(self, budget: float, guard: Guard, stop: threading.Event, clock: Callable[[], float] = time.perf_counter):
        self.budget, self.guard, self.stop, self.clock = budget, guard, stop, clock
        self.worked_s = self.rested_s = 0.0

    @property
    def share(self) -> float:
        return self.budget * self.guard.share()

    def rest(self, worked_s: float) -> None:
        """A rest ends early when the learner is told to stop."""
        self.worked_s += worked_s
        wanted_s = worked_s * (1 / self.share - 1)
        if wanted_s > 0:
            begun_s = self.clock()
            self.stop.wait(wanted_s)
            self.rested_s += self.clock() - begun_s

    @contextmanager
    def work(self) -> Iterator[None]:
        """A piece of work that has no steps, and the rest it calls for."""
        begun_s = self.clock()
        yield
        self.rest(self.clock() - begun_s)
