"""Time of a round, measured while serving, by the tokens that go through the target anyway and by
k. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

# Relative cost of one more drafted token before anything was measured: a guess that the first
# rounds replace.
FIRST_SLOPE = 0.12
KEPT = 15  # measurements; their median counts, for a stall of the machine is not the price of k
BELIEVED = 3  # first measurements of a k, which are not taken for a change of the pace
STALE = 32  # rounds after which what a k took is measured anew
PACED = 5  # latest rounds whose median is the pace


def _bucket_tops() -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ...: at most half as much again from one to the next."""
    tops = [1]
    power = 2
    while power <= 2**16:
        tops += [power, power * 3 // 2]
        power *= 2
    return tops


_TOPS = _bucket_tops()


def bucket_of(num_tokens: int) -> int:
    """The bucket of a round with `num_tokens` known tokens (one a decoding row, and prompt pieces),
    drafts not counted."""
    return _TOPS[min(bisect_left(_TOPS, num_tokens), len(_TOPS) - 1)]


def nearest(bucket: int, others: Iterable[int]) -> int | None:
    """The one of `others` most like it, by ratio."""
    return min(others, key=lambda other: max(other / bucket, bucket / other), default=None)


@dataclass(slots=True)
class _Cell:
    """Rounds of one k, at pace 1."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    seconds: float = 0.0
    seen: int = 0  # the bucket's round number of the last one

    def add(self, seconds: float, number: int) -> None:
        if number - self.seen > STALE:
            self.latest.clear()
        self.latest.append(seconds)
        self.seconds, self.seen = median(self.latest), number


@dataclass(slots=True)
class _Bucket:
    """Times at pace 1, and the pace of now: a machine that others slow down, or requests that are
    sampled after greedy ones, change the rounds of every k alike, but only those of one k are seen.
    """

    cells: dict[int, _Cell] = field(default_factory=dict)
    pace: float = 1.0
    recent: deque[float] = field(default_factory=lambda: deque([1.0] * PACED, maxlen=PACED))
    rounds: int = 0

    @property
    def measured(self) -> dict[int, float]:
        """Seconds at pace 1 of each k that was."""
        return {k: cell.seconds for k, cell in self.cells.items() if cell.latest}

    def add(self, k: int, seconds: float) -> None:
        self.rounds += 1
        cell = self.cells.get(k)
        if cell is None:
            # The first round of its kind may compile, capture or touch new memory: it is not
            # believed.
            self.cells[k] = _Cell(seen=self.rounds)
        elif len(cell.latest) < BELIEVED or self.rounds - cell.seen > STALE:
            cell.add(seconds / self.pace, self.rounds)
        else:
            self.recent.append(seconds / cell.seconds)
            self.pace = median(self.recent)
            if len(cell.latest) < KEPT:
                cell.add(seconds / self.pace, self.rounds)
            cell.seen = self.rounds


class LatencyTable:
    """Medians per (bucket, k) and a moving pace per bucket; what was never measured is inferred
    from its neighbours."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def add(self, bucket: int, k: int, seconds: float) -> None:
        self._buckets.setdefault(bucket, _Bucket()).add(k, seconds)

    def measured(self, bucket: int, k: int) -> bool:
        return self._own(bucket, k) is not None

    def seconds(self, bucket: int, k: int) -> float:
        """Expected seconds of a round of this bucket. Before any measurement only ratios count."""
        if (measured := self._own(bucket, k)) is not None:
            return measured
        own = self._buckets.get(bucket)
        points = [] if own is None else sorted(own.measured.items())
        if own is None or not points:
            return self._from_neighbour(bucket, k)
        if len(points) == 1 or not points[0][0] < k < points[-1][0]:
            return own.pace * self._beyond(bucket, points, k)
        after = next(index for index, point in enumerate(points) if point[0] > k)
        (low, low_s), (high, high_s) = points[after - 1], points[after]
        return own.pace * (low_s + (high_s - low_s) * (k - low) / (high - low))

    def _own(self, bucket: int, k: int) -> float | None:
        """Time from the bucket's own cell, read without iterating over the cells, which may grow in
        another thread."""
        own = self._buckets.get(bucket)
        cell = None if own is None else own.cells.get(k)
        return (
            own.pace * cell.seconds
            if own is not None and cell is not None and cell.latest
            else None
        )

    def _beyond(self, bucket: int, points: list[tuple[int, float]], k: int) -> float:
        """Extrapolated seconds: by the ratio of the nearest bucket with both measured, else by the
        last slope.

        One point alone has no slope. It follows all that the nearest bucket with several points
        infers: a distant load that happens to have just this k measured would make it look cheaper
        than a lesser one.
        """
        near, near_s = points[0] if k < points[0][0] else points[-1]
        other = (
            self._nearest(bucket, near, several=True)
            if len(points) == 1
            else self._nearest(bucket, near, k)
        )
        if other is not None:
            return near_s * self.seconds(other, k) / self.seconds(other, near)
        if len(points) > 1 and k > near:
            (before, before_s), _ = points[-2], points[-1]
            slope = max(0.0, (near_s - before_s) / (near - before))
        else:
            slope = FIRST_SLOPE * near_s / (1.0 + FIRST_SLOPE * near)
        return max(near_s + slope * (k - near), 0.1 * near_s)

    def _nearest(self, bucket: int, *ks: int, several: bool = False) -> int | None:
        """The bucket most like this one with all of `ks` measured, and another k too if `several`
        must be."""
        found = [
            number
            for number, other in self._buckets.items()
            if number != bucket
            and all(k in other.measured for k in ks)
            and (not several or len(other.measured) > 1)
        ]
        return nearest(bucket, found)

    def _from_neighbour(self, bucket: int, k: int) -> float:
        other = nearest(
            bucket, [number for number, other in self._buckets.items() if other.measured]
        )
        return 1.0 + FIRST_SLOPE * k if other is None else self.seconds(other, k)


MEMORY = 200.0  # rounds
LEAST_VARIANCE = 0.05  # of drafted tokens a round; below it the slope cannot be measured
# factor per such round on the last slope: rounds must differ again before it is measured anew
FORGETTING = 0.995


@dataclass(slots=True)
class MarginalCost:
    """The slope of least squares of seconds over drafted tokens, older rounds fading."""

    seconds: float = 0.0
    weight: float = 0.0
    mean_tokens: float = 0.0
    mean_s: float = 0.0
    squares: float = 0.0  # of deviations of tokens
    products: float = 0.0  # of deviations of tokens and seconds

    def add(self, num_drafted: int, seconds: float) -> None:
        fade = 1.0 - 1.0 / MEMORY
        self.weight = fade * self.weight + 1.0
        off, off_s = num_drafted - self.mean_tokens, seconds - self.mean_s
        self.mean_tokens += off / self.weight
        self.mean_s += off_s / self.weight
        self.squares = fade * self.squares + off * (num_drafted - self.mean_tokens)
        self.products = fade * self.products + off * (seconds - self.mean_s)
        if self.squares > LEAST_VARIANCE * self.weight:
            self.seconds = max(0.0, self.products / self.squares)
        else:
            self.seconds *= FORGETTING
