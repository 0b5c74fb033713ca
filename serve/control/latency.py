"""Time of a round, measured while serving, by the tokens that go through the target anyway and by
k. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

# Relative cost of one more drafted token before two k were measured anywhere.
FIRST_SLOPE = 0.12
KEPT = 15  # measurements of a k; their median counts, for a stall of the machine is not its price
BELIEVED = 3  # first measurements of a k, which are not taken for a change of the pace
STALE = 32  # rounds of a bucket after which a k is measured anew
PACED = 5  # latest rounds whose median is the pace

# 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half as much again from one to the next
_TOPS = [1, 2] + [top for power in range(1, 17) for top in (3 * 2 ** (power - 1), 2 ** (power + 1))]


def bucket_of(num_tokens: int) -> int:
    """The bucket of a round with `num_tokens` known tokens (one a decoding row, and prompt pieces),
    drafts not counted."""
    return _TOPS[min(bisect_left(_TOPS, num_tokens), len(_TOPS) - 1)]


def nearest(bucket: int, others: Iterable[int]) -> int | None:
    """The one of `others` most like it, by ratio."""
    return min(others, key=lambda other: max(other / bucket, bucket / other), default=None)


@dataclass(slots=True)
class _Cell:
    """Rounds of one k, at pace 1. The first round of its kind may compile, capture or touch new
    memory: it makes the cell and is not kept."""

    seen: int  # the bucket's round number of the last one
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))


@dataclass(slots=True)
class _Bucket:
    """Times at pace 1, and the pace of now: a machine that others slow down, or requests that are
    sampled after greedy ones, change the rounds of every k alike, but only those of one k are seen.
    """

    cells: dict[int, _Cell] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque([1.0] * PACED, maxlen=PACED))
    rounds: int = 0

    def add(self, k: int, seconds: float) -> None:
        self.rounds += 1
        cell = self.cells.get(k)
        if cell is None:
            self.cells[k] = _Cell(self.rounds)
            return
        if self.rounds - cell.seen > STALE:
            cell.latest.clear()
        if len(cell.latest) >= BELIEVED:
            self.recent.append(seconds / median(cell.latest))
        if len(cell.latest) < KEPT:
            cell.latest.append(seconds / median(self.recent))
        cell.seen = self.rounds

    def seconds(self, k: int) -> float | None:
        """Median at the pace of now; None where nothing was measured."""
        cell = self.cells.get(k)
        return median(cell.latest) * median(self.recent) if cell and cell.latest else None

    def measured(self) -> dict[int, float]:
        """Seconds of each measured k, ascending."""
        found = {k: self.seconds(k) for k in sorted(self.cells)}
        return {k: seconds for k, seconds in found.items() if seconds is not None}


class LatencyTable:
    """Medians per (bucket, k) and a moving pace per bucket; what was never measured is inferred
    from the bucket's other k and from its nearest neighbour."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def add(self, bucket: int, k: int, seconds: float) -> None:
        self._buckets.setdefault(bucket, _Bucket()).add(k, seconds)

    def measured(self, bucket: int, k: int) -> bool:
        """Never iterates over cells, which may grow in another thread; nor does `seconds` then."""
        own = self._buckets.get(bucket)
        return own is not None and own.seconds(k) is not None

    def seconds(self, bucket: int, k: int) -> float:
        """Expected seconds of a round of this bucket. Before any measurement only ratios count."""
        own = self._buckets.get(bucket)
        if own is not None and (seconds := own.seconds(k)) is not None:
            return seconds
        points = {} if own is None else own.measured()
        if len(points) > 1:
            return _on_line(points, k)
        other = self._nearest(bucket, at_least=1 + len(points))
        if not points:
            return 1.0 + FIRST_SLOPE * k if other is None else self.seconds(other, k)
        ((near, near_s),) = points.items()
        if other is None:
            return near_s * (1.0 + FIRST_SLOPE * k) / (1.0 + FIRST_SLOPE * near)
        return near_s * self.seconds(other, k) / self.seconds(other, near)

    def _nearest(self, bucket: int, *, at_least: int) -> int | None:
        """The other bucket most like this one with so many k measured."""
        numbers = [
            number
            for number, other in self._buckets.items()
            if number != bucket and len(other.measured()) >= at_least
        ]
        return nearest(bucket, numbers)


def _on_line(points: dict[int, float], k: int) -> float:
    """Seconds on the line through the two points around `k`, or the two at its side; beyond the
    last one never less than that."""
    ks = list(points)
    after = min(max(bisect_left(ks, k), 1), len(ks) - 1)
    low, high = ks[after - 1], ks[after]
    seconds = points[low] + (points[high] - points[low]) * (k - low) / (high - low)
    return max(seconds, points[high] if k > high else 0.1 * points[low])


class MarginalCost:
    """Seconds of one more drafted token: the slope of least squares, older rounds fading."""

    MEMORY = 200.0  # rounds
    LEAST_VARIANCE = 0.05  # of drafted tokens per round; below it no slope can be measured
    FORGETTING = 0.995  # factor on the last slope then: rounds must differ again

    def __init__(self) -> None:
        self.seconds = 0.0
        # of 1, tokens, seconds, squares of tokens, products
        self._sums = 0.0, 0.0, 0.0, 0.0, 0.0

    def add(self, num_drafted: int, seconds: float) -> None:
        fade = 1.0 - 1.0 / self.MEMORY
        rounds, tokens, total_s, squares, products = self._sums
        rounds = fade * rounds + 1.0
        tokens = fade * tokens + num_drafted
        total_s = fade * total_s + seconds
        squares = fade * squares + num_drafted**2
        products = fade * products + num_drafted * seconds
        self._sums = rounds, tokens, total_s, squares, products
        variance = rounds * squares - tokens**2
        if variance > self.LEAST_VARIANCE * rounds**2:
            self.seconds = max(0.0, (rounds * products - tokens * total_s) / variance)
        else:
            self.seconds *= self.FORGETTING
