"""How the draft of a class stands against the live draft, on the newest held-out requests of the class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from draftsmith.distill.config import GateConfig
from draftsmith.distill.gate import Comparison, compare, difference
from draftsmith.distill.sequential import Evidence

# Of the stake: what is left when the draft was better for a while, and the question is begun anew.
LOST = 0.5


@dataclass
class Standing:
    """Two questions may be asked at any time, as the gate asks its own: is the class's draft better than the live one, and is it
    better by less than `gate.gain`? The second asks about now: what its being better has cost the evidence is written off, so
    that `gate.error` bounds each beginning of it."""

    config: GateConfig
    better: Evidence = field(default_factory=Evidence)
    no_better: Evidence = field(default_factory=Evidence)
    versions: tuple[int, int] = (0, 0)  # of the class and of the live draft, at the latest look
    looks: int = 0
    latest: Comparison | None = None  # live -> class

    def look(
        self, requests: Sequence[str], live: Sequence[np.ndarray], own: Sequence[np.ndarray], *, versions: tuple[int, int]
    ) -> None:
        """alpha of both drafts, at the same positions of each request; at least one request has a position."""
        if versions != self.versions:
            self.versions = versions
            self.better.new_candidate()
            self.no_better = Evidence()
        elif self.no_better.value < LOST:
            self.no_better = Evidence(seen=self.no_better.seen)
        gained = {request: difference(a, b) for request, a, b in zip(requests, live, own, strict=True) if len(a)}
        self.looks += 1
        self.latest = compare(live, own)
        self.better.look(gained, self.config.error)
        self.no_better.look({request: self.config.gain - d for request, d in gained.items()}, self.config.error)

    @property
    def is_better(self) -> bool:
        return self._has(self.better) and self.gain >= self.config.gain

    @property
    def is_no_better(self) -> bool:
        return self._has(self.no_better) and self.gain < self.config.gain

    @property
    def gain(self) -> float:
        return self.latest.gain if self.latest else 0.0

    def _has(self, evidence: Evidence) -> bool:
        requests = self.latest.requests if self.latest else 0
        return requests >= self.config.requests and evidence.value * self.config.error >= 1

    def describe(self) -> str:
        if self.latest is None:
            return "no held-out requests yet"
        live, own, requests = self.latest.first, self.latest.second, self.latest.requests
        return f"alpha {live:.4f} -> {own:.4f} with a draft of its own, gain {self.gain:+.4f} over {requests} requests"

    def to_dict(self) -> dict[str, Any]:
        return {
            "better": asdict(self.better),
            "no_better": asdict(self.no_better),
            "versions": self.versions,
            "looks": self.looks,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], config: GateConfig) -> Standing:
        own, live = values["versions"]
        return cls(config, Evidence(**values["better"]), Evidence(**values["no_better"]), (own, live), values["looks"])
