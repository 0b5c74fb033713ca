"""Times of a follower: polls with jitter, longer waits after failures, and downloads spread over a
span, so that a thousand engines do not read a new version in the same second."""

from __future__ import annotations

import random

from draftsmith.fleet.store.rollout import hashed

LONGEST_WAIT_S = 300.0


class Pace:
    """Waits of one engine, in seconds."""

    def __init__(self, engine: str, poll_s: float, *, spread_s: float = 0.0):
        self.engine, self.poll_s, self.spread_s = engine, poll_s, spread_s
        self.failures = 0
        self._random = random.Random(engine)

    def next_poll_s(self, *, failed: bool = False) -> float:
        """Wait before the next poll, 0.5 to 1.5 times `poll_s`; doubled at each failure in a
        row, up to `LONGEST_WAIT_S`."""
        self.failures = self.failures + 1 if failed else 0
        longest_s = max(self.poll_s, LONGEST_WAIT_S)
        wait_s = min(longest_s, self.poll_s * 2.0 ** min(self.failures, 30))
        return wait_s * self._random.uniform(0.5, 1.5)

    def download_delay_s(self, version: int) -> float:
        """Delay of a version's download after it was first seen, the same at every look: uniform
        over `spread_s` across engines, another one for each version."""
        return self.spread_s * hashed(f"download/{version}/{self.engine}")
