"""Survival of drafted tokens by request class: the chance that position i is kept given that it was
reached. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

FIRST_ALPHA = 0.6
CLASS_WEIGHT = 24.0  # weight of the pooled rate in a class's own, in rounds
DEPTH_WEIGHT = 4.0  # how much a position says about the next one
MEMORY = 400.0  # rounds
LEAST_VARIANCE = 0.04  # of one draft's being kept
MAX_CLASSES = 256


@dataclass(slots=True)
class _Counts:
    """Sums over rounds, older ones fading."""

    reached: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)

    def add(self, offered: int, accepted: int, times: int) -> None:
        while len(self.reached) < offered:
            self.reached.append(0.0)
            self.kept.append(0.0)
        fade = max(1.0 - times / MEMORY, 0.0)
        for position in range(min(accepted + 1, offered)):
            self.reached[position] = fade * self.reached[position] + times
            self.kept[position] = fade * self.kept[position] + (
                times if position < accepted else 0.0
            )

    def alpha(self, position: int, prior: float, weight: float) -> float:
        if position >= len(self.reached):
            return prior
        return (self.kept[position] + weight * prior) / (self.reached[position] + weight)

    def scale(self, factor: float) -> None:
        self.reached = [factor * value for value in self.reached]
        self.kept = [factor * value for value in self.kept]


class Survival:
    """Shrinks each class towards the pooled rate, and each position towards the previous one, until
    it has enough rounds."""

    def __init__(self) -> None:
        self._all = _Counts()
        self._classes: dict[str, _Counts] = {}

    def add(self, request_class: str, offered: int, accepted: int, times: int = 1) -> None:
        """`times` rounds that went alike."""
        self._all.add(offered, accepted, times)
        counts = self._classes.pop(request_class, None) or _Counts()
        counts.add(offered, accepted, times)
        self._classes[request_class] = counts
        if len(self._classes) > MAX_CLASSES:
            # The class that was quiet for longest.
            del self._classes[next(iter(self._classes))]

    def chances(self, request_class: str, k: int) -> list[float]:
        """Chances that the first, the first two, ..., the first `k` drafted tokens are kept."""
        counts = self._classes.get(request_class, _Counts())
        chances, survived, common = [], 1.0, FIRST_ALPHA
        for position in range(k):
            common = self._all.alpha(position, common, DEPTH_WEIGHT)
            survived *= counts.alpha(position, common, CLASS_WEIGHT)
            chances.append(survived)
        return chances

    def spreads(self, k: int) -> list[float]:
        """Deviations of the chances that each position is kept, given that it was reached."""
        spreads, common = [], FIRST_ALPHA
        for position in range(k):
            common = self._all.alpha(position, common, DEPTH_WEIGHT)
            rounds = self._all.reached[position] if position < len(self._all.reached) else 0.0
            variance = max(common * (1.0 - common), LEAST_VARIANCE)
            spreads.append(sqrt(variance / (rounds + DEPTH_WEIGHT)))
        return spreads

    def doubt(self, left: float) -> None:
        """Scale the weight of earlier counts by `left`: weights have changed, or they are old."""
        for counts in (self._all, *self._classes.values()):
            counts.scale(left)
