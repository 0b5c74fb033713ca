"""Estimates that k is chosen by: seconds of a round of one load at each k, and the survival of
drafted tokens by request class. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, log, sqrt
from statistics import median_low

from draftsmith.serve.control.control import MAX_AUTO_K

FIRST_SLOPE = 0.12  # relative price of one more drafted token before two k were measured anywhere
TOGETHER = 8  # usual rounds that are one measurement
FEWEST = 2  # rounds that are one where another k follows
BELIEVED = 3  # measurements of a k after which its usual rounds show the machine's pace

FIRST_ALPHA = 0.6
# Rounds that weigh as much as the first guess, the previous position, the pooled rate.
FIRST_WEIGHT, DEPTH_WEIGHT, CLASS_WEIGHT = 4.0, 12.0, 24.0
MEMORY = 400.0  # rounds
MAX_CLASSES = 256


class DraftLengths:
    """Tokens that rows draft of those planned, by position, older rounds fading: a drafter from
    text often has fewer."""

    def __init__(self) -> None:
        self._shares, self._rows = [1.0] * MAX_AUTO_K, [FIRST_WEIGHT] * MAX_AUTO_K

    def add(self, planned: int, drafted: int, times: int) -> None:
        for position in range(min(planned, MAX_AUTO_K)):
            self._rows[position] = min(self._rows[position] + times, MEMORY)
            change = (position < drafted) - self._shares[position]
            self._shares[position] += change * min(1.0, times / self._rows[position])

    def of(self, k: int) -> float:
        """Tokens that a row drafts where k are planned."""
        return sum(accumulate(self._shares[:k], min))


class RoundTimes:
    """Seconds of a round of one load by k, the tokens that a row drafted. Rounds of the usual plan
    are slower or faster because the machine is, so they change all k alike; rounds of another plan
    show the price of their k beside that."""

    def __init__(self) -> None:
        # Before any measurement only ratios count.
        self.by_k = [1.0 + FIRST_SLOPE * k for k in range(MAX_AUTO_K + 1)]
        self.counts: dict[int, int] = {}  # measurements by k
        # Tokens and seconds of the latest rounds, by k and whether their plan was the usual one.
        # They are held against the prices of when they are taken in: what one k has shown of the
        # machine's pace is not counted again for another.
        self._latest: dict[tuple[int, bool], list[tuple[float, float]]] = {}

    @property
    def compared(self) -> bool:
        return len(self.counts) > 1

    def like(self, other: RoundTimes) -> None:
        """Take the ratios of another load."""
        scale = next((self.by_k[k] / other.by_k[k] for k in self.counts), 1.0)
        self.by_k = [scale * seconds for seconds in other.by_k]

    def at(self, depth: float) -> float:
        """Seconds between those of two k."""
        low = min(int(depth), MAX_AUTO_K - 1)
        return self.by_k[low] + (depth - low) * (self.by_k[low + 1] - self.by_k[low])

    def add(self, depth: float, seconds: float, *, usual: bool) -> None:
        """Take in a round whose rows drafted `depth` tokens on average."""
        k = round(depth)
        latest = self._latest.setdefault((k, usual), [])
        latest.append((depth, seconds))
        if len(latest) == TOGETHER:
            self._take_in(k, usual)

    def settle(self) -> None:
        """Take in the latest rounds."""
        for k, usual in list(self._latest):
            self._take_in(k, usual)

    def _take_in(self, k: int, usual: bool) -> None:
        latest = self._latest.pop((k, usual))
        if len(latest) < FEWEST:
            return
        rounds = len(latest)
        change = median_low([log(seconds / self.at(depth)) for depth, seconds in latest])
        known = self.counts.get(k, 0)
        self.counts[k] = known + 1
        if not self.compared:
            self._change_pace(change)
        elif usual and known >= BELIEVED:
            self._change_pace(change * rounds / TOGETHER)
        else:
            self._change(k, change * max(1.0 / (known + 1), 0.25))

    def _change_pace(self, change: float) -> None:
        self.by_k = [exp(change) * seconds for seconds in self.by_k]

    def _change(self, k: int, change: float) -> None:
        """Change one k, and those that were not measured to the line between those that were."""
        self.by_k[k] *= exp(change)
        for other in self.counts:  # a deeper draft takes no less
            bound = max if other > k else min
            self.by_k[other] = bound(self.by_k[other], self.by_k[k])
        first, *_, last = known = sorted(self.counts)
        for other in set(range(first, MAX_AUTO_K + 1)) - self.counts.keys():
            low, high = max(each for each in known if each < other), last
            if other > last:
                low = first
            else:
                high = min(each for each in known if each > other)
            slope_s = (self.by_k[high] - self.by_k[low]) / (high - low)
            self.by_k[other] = self.by_k[low] + slope_s * (other - low)


@dataclass(slots=True)
class _Counts:
    """Sums over rounds by position, older ones fading."""

    reached: dict[int, float] = field(default_factory=dict)
    kept: dict[int, float] = field(default_factory=dict)

    def add(self, offered: int, accepted: int, times: int) -> None:
        fade = max(1.0 - times / MEMORY, 0.0)
        for position in range(min(accepted + 1, offered)):
            kept = times if position < accepted else 0
            self.reached[position] = fade * self.reached.get(position, 0.0) + times
            self.kept[position] = fade * self.kept.get(position, 0.0) + kept

    def alpha(self, position: int, prior: float, weight: float) -> float:
        kept, reached = self.kept.get(position, 0.0), self.reached.get(position, 0.0)
        return (kept + weight * prior) / (reached + weight)


class Survival:
    """Shrinks each class towards the pooled rate, and each position towards the previous one, until
    it has enough rounds."""

    def __init__(self) -> None:
        self._all = _Counts()
        self._classes: dict[str, _Counts] = {}

    def add(self, request_class: str, offered: int, accepted: int, times: int = 1) -> None:
        """`times` rounds that went alike."""
        counts = self._classes.pop(request_class, None) or _Counts()
        self._classes[request_class] = counts
        for each in (self._all, counts):
            each.add(offered, accepted, times)
        if len(self._classes) > MAX_CLASSES:
            # The class that was quiet for longest.
            del self._classes[next(iter(self._classes))]

    def chances(self, request_class: str, k: int, hope: float = 0.0) -> list[float]:
        """Chances that the first, the first two, ..., the first `k` drafted tokens are kept; `hope`
        standard deviations, at most, above what is known."""
        counts = self._classes.get(request_class, _Counts())
        chances, survived, common = [], 1.0, FIRST_ALPHA
        for position in range(k):
            common = self._all.alpha(position, common, DEPTH_WEIGHT if position else FIRST_WEIGHT)
            spread = 0.5 / sqrt(counts.reached.get(position, 0.0) + FIRST_WEIGHT)
            alpha = counts.alpha(position, common, CLASS_WEIGHT)
            survived *= min(1.0, alpha + hope * spread)
            chances.append(survived)
        return chances

    def doubt(self, left: float) -> None:
        """Scale the weight of earlier counts by `left`: weights have changed, or they are old."""
        for counts in (self._all, *self._classes.values()):
            for sums in (counts.reached, counts.kept):
                for position in sums:
                    sums[position] *= left
