"""Comparison of a class's own draft with the live draft, on the newest held-out requests of the
class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftsmith.distill.config import GateConfig
from draftsmith.distill.gate.gate import Comparison, compare, difference
from draftsmith.distill.gate.sequential import TurningEvidence


@dataclass
class ClassComparison:
    """Evidence that the class's draft is better by less than `gate.gain`.

    It holds at any time, with error `gate.error` for two versions. It is about now: losses from the
    time when the draft was better are written off.
    """

    no_better: TurningEvidence = field(default_factory=TurningEvidence)
    versions: tuple[int, ...] = (0, 0)  # of the class and of the live draft, at the latest look
    window: list[str] = field(default_factory=list)  # the requests of the latest look
    latest: Comparison | None = None  # live -> class

    def look(
        self,
        requests: Sequence[str],
        live: Sequence[np.ndarray],
        own: Sequence[np.ndarray],
        config: GateConfig,
        *,
        versions: tuple[int, int],
    ) -> None:
        """Adds a look: alpha of both drafts at the same positions of each request, empty for a
        request that cannot be scored."""
        self.window = list(requests)
        if versions != self.versions:
            self.versions, self.no_better = versions, TurningEvidence()
        gained = {
            request: difference(a, b)
            for request, a, b in zip(requests, live, own, strict=True)
            if len(a)
        }
        self.latest = compare(live, own)
        self.no_better.look({request: config.gain - d for request, d in gained.items()})

    def is_no_better(self, config: GateConfig) -> bool:
        latest = self.latest
        if latest is None or latest.requests < config.requests or latest.gain >= config.gain:
            return False
        return self.no_better.value * config.error >= 1

    def describe(self) -> str:
        if self.latest is None:
            return "no held-out requests yet"
        live, own, gain, requests = (
            self.latest.first,
            self.latest.second,
            self.latest.gain,
            self.latest.requests,
        )
        return (
            f"alpha {live:.4f} -> {own:.4f} with a draft of its own, gain {gain:+.4f} over "
            f"{requests} requests"
        )
