"""Limit of the wall time that learning takes: after each piece of work the learner rests in
proportion, so that a server on the same device waits for one step at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A longer rest is taken in pieces, with `look_up` between them, and so is longer work.
MOST_REST_S = 5.0


def nothing() -> None:
    """Default of `look_up`: no call between pieces of rest."""


class Throttle:
    """Rest after work.

    Args:
        budget: most of the wall time, above 0 and at most 1.

    Attributes:
        look_up: called within long rests between steps.
    """

    def __init__(
        self,
        budget: float,
        stop: threading.Event,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.budget, self.stop, self.clock = budget, stop, clock
        self.look_up: Callable[[], object] = nothing
        self.worked_s = self.rested_s = 0.0
        self.owed_s = 0.0  # work that is not rested for yet
        self.seen_s = 0.0  # work up to the latest look

    def rest(self, worked_s: float) -> None:
        """Rests between the steps of an update, until nothing is owed or a stop is requested. Looks
        up within long work, too."""
        self._owe(worked_s)
        if self.worked_s - self.seen_s >= MOST_REST_S:
            self.seen_s = self.worked_s
            self.look_up()
        while not self.pay() and not self.stop.is_set():
            self.look_up()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Context of a piece of work without steps. Rest beyond a single piece stays owed, before
        the next cycle's work."""
        begun_s = self.clock()
        yield
        self._owe(self.clock() - begun_s)
        self.pay()

    def _owe(self, worked_s: float) -> None:
        self.worked_s += worked_s
        self.owed_s += worked_s

    def pay(self) -> bool:
        """Takes a piece of rest, if any is due; True once nothing is owed."""
        wanted_s = self.owed_s * (1 / self.budget - 1)
        if wanted_s > 0:
            begun_s = self.clock()
            self.stop.wait(min(wanted_s, MOST_REST_S))
            self.rested_s += self.clock() - begun_s
        self.owed_s *= 1 - MOST_REST_S / wanted_s if wanted_s > MOST_REST_S else 0.0
        return self.owed_s == 0.0
