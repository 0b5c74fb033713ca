"""How long a round takes, measured while serving, by the tokens that go through the target anyway and by k. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Relative cost of one more drafted token before anything was measured: a guess that the first rounds replace.
FIRST_SLOPE = 0.12
KEPT = 15  # measurements; their median counts, for a stall of the machine is not the price of k


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
    """The bucket of a round with `num_tokens` known tokens (one a decoding row, and prompt pieces), drafts not counted."""
    return _TOPS[min(bisect_left(_TOPS, num_tokens), len(_TOPS) - 1)]


@dataclass(slots=True)
class _Cell:
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.latest.append(seconds)
        self.seconds = median(self.latest)


class LatencyTable:
    """Moving medians per (bucket, k); what was never measured is inferred from its neighbours."""

    def __init__(self) -> None:
        self._cells: dict[int, dict[int, _Cell]] = {}

    def add(self, bucket: int, k: int, seconds: float) -> None:
        cells = self._cells.setdefault(bucket, {})
        if k in cells:
            cells[k].add(seconds)
        else:
            # The first round of its kind may compile, capture or touch new memory: it is not believed.
            cells[k] = _Cell()

    def measured(self, bucket: int, k: int) -> bool:
        cell = self._cells.get(bucket, {}).get(k)
        return cell is not None and len(cell.latest) > 0

    def seconds(self, bucket: int, k: int) -> float:
        """Of a round of this bucket. Before anything was measured anywhere only ratios mean something."""
        if self.measured(bucket, k):
            return self._cells[bucket][k].seconds
        points = sorted((k, cell.seconds) for k, cell in self._cells.get(bucket, {}).items() if cell.latest)
        if not points:
            return self._from_neighbour(bucket, k)
        if len(points) == 1 or not points[0][0] < k < points[-1][0]:
            return self._beyond(bucket, points, k)
        after = next(index for index, point in enumerate(points) if point[0] > k)
        (low, low_s), (high, high_s) = points[after - 1], points[after]
        return low_s + (high_s - low_s) * (k - low) / (high - low)

    def _beyond(self, bucket: int, points: list[tuple[int, float]], k: int) -> float:
        """By the ratio that the nearest bucket with both measured has, else by the last slope; one point alone has no slope, so
        it goes by what another bucket infers from its own."""
        near, near_s = points[0] if k < points[0][0] else points[-1]
        other = self._nearest(bucket, near, k)
        if other is None and len(points) == 1:
            other = self._nearest(bucket, near, several=True)
        if other is not None:
            return near_s * self.seconds(other, k) / self._cells[other][near].seconds
        if len(points) > 1 and k > near:
            (before, before_s), _ = points[-2], points[-1]
            slope = max(0.0, (near_s - before_s) / (near - before))
        else:
            slope = FIRST_SLOPE * near_s / (1.0 + FIRST_SLOPE * near)
        return max(near_s + slope * (k - near), 0.1 * near_s)

    def _nearest(self, bucket: int, *ks: int, several: bool = False) -> int | None:
        """The bucket most like this one with all of `ks` measured, and another k too if `several` must be."""
        found = [
            other
            for other, cells in self._cells.items()
            if other != bucket
            and all(self.measured(other, k) for k in ks)
            and (not several or sum(len(cell.latest) > 0 for cell in cells.values()) > 1)
        ]
        return min(found, key=lambda other: max(other / bucket, bucket / other), default=None)

    def _from_neighbour(self, bucket: int, k: int) -> float:
        known = [other for other, cells in self._cells.items() if any(cell.latest for cell in cells.values())]
        if not known:
            return 1.0 + FIRST_SLOPE * k
        return self.seconds(min(known, key=lambda other: max(other / bucket, bucket / other)), k)
