"""Limit of the wall time that learning takes, and its reduction by a server's latency.

After each piece of work the learner rests in proportion, so that a server on the same device waits
for one step at most. Where the server's latency is watched, the share falls while that is too high.
The length of a rest follows the share at the time of the rest: when the server has time again, so
has the learner.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import httpx

from draftsmith.client import Scrape, base_of, parse
from draftsmith.errors import UserError

# A longer rest is taken in pieces, with `look_up` between them, and so is longer work.
MOST_REST_S = 5.0


def nothing() -> None:
    """Default of `look_up`: no call between pieces of rest."""


class Throttle:
    """Rest after work.

    Args:
        budget: most of the wall time, above 0 and at most 1.
        guard: the share of the budget that learning may take now, above 0 and at most 1.

    Attributes:
        look_up: called within long rests between steps.
    """

    def __init__(
        self,
        budget: float,
        stop: threading.Event,
        *,
        guard: Callable[[], float] = lambda: 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.budget, self.stop, self.guard, self.clock = budget, stop, guard, clock
        self.look_up: Callable[[], object] = nothing
        self.worked_s = self.rested_s = 0.0
        self.owed_s = 0.0  # work that is not rested for yet
        self.seen_s = 0.0  # work up to the latest look

    @property
    def share(self) -> float:
        return self.budget * self.guard()

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
        wanted_s = self.owed_s * (1 / self.share - 1)
        if wanted_s > 0:
            begun_s = self.clock()
            self.stop.wait(min(wanted_s, MOST_REST_S))
            self.rested_s += self.clock() - begun_s
        self.owed_s *= 1 - MOST_REST_S / wanted_s if wanted_s > MOST_REST_S else 0.0
        return self.owed_s == 0.0


LOOK_S = 2.0
LEAST = 1 / 64
MORE = 1.2  # a look; from the least share to all of it in 46 s
TPOT = "vllm:request_time_per_output_token_seconds_bucket"
Read = Callable[[], Scrape | None]


class LatencyGuard:
    """Share by a server's `/metrics`, read at most once per `LOOK_S`."""

    def __init__(self, read: Read, bound_s: float, clock: Callable[[], float] = time.monotonic):
        self.read, self.bound_s, self.clock = read, bound_s, clock
        # of the requests that ended between the latest two looks; NaN where none did
        self.p95_s = math.nan
        self._share = 1.0
        self._looked_s = -math.inf
        self._before: Scrape | None = None

    def share(self) -> float:
        now_s = self.clock()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look()
        return self._share

    def _look(self) -> None:
        self.p95_s = self._measure()
        self._share = (
            max(LEAST, self._share / 2)
            if self.p95_s > self.bound_s
            else min(1.0, self._share * MORE)
        )

    def _measure(self) -> float:
        before, self._before = self._before, self.read()
        if before is None or self._before is None:
            return math.nan
        try:
            return quantile(self._before.since(before).by(TPOT, "le"), 0.95)
        except UserError:
            # Its counters fell: another server, whose requests are counted from now on.
            return math.nan


def quantile(buckets: Mapping[str, float], share: float) -> float:
    """Quantile of a Prometheus histogram, cumulative counts by upper bound. Between two bounds all
    values are equally likely."""
    bounds = sorted((float(bound), count) for bound, count in buckets.items())
    if not bounds or bounds[-1][1] <= 0:
        return math.nan
    wanted, lower, below = share * bounds[-1][1], 0.0, 0.0
    for bound, count in bounds:
        if count >= wanted and count > below:
            return (
                lower
                if math.isinf(bound)
                else lower + (bound - lower) * (wanted - below) / (count - below)
            )
        lower, below = bound, count
    return lower


def scraper(url: str) -> Read:
    """Reader of a server's metrics; None while it cannot be reached, when there is no traffic to
    disturb."""
    base = base_of(url, "server")

    def read() -> Scrape | None:
        try:
            answer = httpx.get(f"{base}/metrics", timeout=5.0)
            answer.raise_for_status()
        except httpx.HTTPError:
            return None
        return parse(answer.text)

    return read
