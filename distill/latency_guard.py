"""A server's own latency decides how much a learner beside it may do: half as much while it is too high, then slowly more."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import httpx

from draftsmith.errors import UserError
from draftsmith.metrics_text import Scrape, parse

LOOK_S = 2.0
LEAST = 1 / 64
MORE = 1.2  # a look; from the least share to all of it in 46 s
TPOT = "vllm:request_time_per_output_token_seconds_bucket"

Read = Callable[[], Scrape | None]


class LatencyGuard:
    """Looks at `/metrics` when asked for its share, once in `LOOK_S` at most."""

    def __init__(self, read: Read, bound_s: float, clock: Callable[[], float] = time.monotonic):
        self.read, self.bound_s, self.clock = read, bound_s, clock
        self.p95_s = math.nan  # of the requests that ended between the latest two looks; NaN where none did
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
        self._share = max(LEAST, self._share / 2) if self.p95_s > self.bound_s else min(1.0, self._share * MORE)

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
    """Of a Prometheus histogram, cumulative counts by upper bound; between two bounds all values are equally likely."""
    bounds = sorted((float(bound), count) for bound, count in buckets.items())
    if not bounds or bounds[-1][1] <= 0:
        return math.nan
    wanted, lower, below = share * bounds[-1][1], 0.0, 0.0
    for bound, count in bounds:
        if count >= wanted and count > below:
            return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return lower


def scraper(url: str) -> Read:
    """Reads a server's metrics; None while it cannot be reached, when nobody is there to be disturbed."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise UserError(f"server is {url!r}; give a URL such as http://127.0.0.1:8000")

    def read() -> Scrape | None:
        try:
            answer = httpx.get(f"{base}/metrics", timeout=5.0)
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL):
            return None
        return parse(answer.text)

    return read
