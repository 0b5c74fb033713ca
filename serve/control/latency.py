"""Time of a round, measured while serving, by the tokens that go through the target anyway and by
k. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log, log2, sqrt
from statistics import fmean, median
from typing import NamedTuple

from draftsmith.serve.control.control import MAX_AUTO_K

Matrix = list[list[float]]

SIZE = MAX_AUTO_K + 1
# Relative cost of one more drafted token before two k were measured anywhere.
FIRST_SLOPE = 0.12
# Deviations of logarithms of times before anything is measured: of drafting at all, of twice as
# many tokens, from one k to the next, and of each k by itself.
DRAFTING, SLOPE, STEP, OWN = 0.4, 0.15, 0.05, 0.03
FORGETTING = 1.0 / 8000.0  # share of that uncertainty which comes back with each round
WIDENING = 0.25  # share of it for what a load twice as large or half as large takes
JUMP = 0.2  # share of it that a change of the pace by a factor of e brings back
PACE = 0.005  # deviation of the machine's pace from one round to the next
CLIP = 3.0  # deviations beyond which a round counts as a stall of the machine
PROBE_ROUNDS = 3  # rounds of a probe; the median of fewer may be a single one's luck
TOGETHER = 8  # rounds of a kind that are one measurement
UNLIKELY = 3.0  # deviations beyond which rounds that agree are a change of the pace
BELIEVED = 4  # fewer rounds are no such change, nor are the first ones of a k
FIRST_NOISE, LEAST_NOISE = 0.1, 0.02  # deviation of a single round

# 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half as much again from one to the next
_TOPS = [1, 2] + [top for power in range(1, 17) for top in (3 * 2 ** (power - 1), 2 ** (power + 1))]


class Bucket(NamedTuple):
    """Rounds of about as many deciding rows and known tokens: one a row, and prompt pieces."""

    rows: int
    tokens: int

    @property
    def alone(self) -> Bucket:
        """The same rows without prompts."""
        return Bucket(self.rows, self.rows)

    def doublings(self, other: Bucket) -> float:
        """Distance from another."""
        return abs(log2(self.rows / other.rows)) + 0.5 * abs(log2(self.tokens / other.tokens))


@lru_cache(maxsize=1024)
def bucket_of(num_rows: int, num_tokens: int | None = None) -> Bucket:
    """The bucket of a round with `num_tokens` known tokens, drafts not counted; by default none but
    those of the rows."""
    rows = _top(max(1, num_rows))
    return Bucket(rows, rows if num_tokens in (None, num_rows) else _top(num_tokens))


def _top(count: int) -> int:
    return _TOPS[min(bisect_left(_TOPS, count), len(_TOPS) - 1)]


def _first_covariance() -> Matrix:
    """Near k are alike, and all k that draft."""
    return [
        [
            (k > 0 and other > 0) * DRAFTING**2
            + SLOPE**2 * log2(1 + k) * log2(1 + other)
            + STEP**2 * min(k, other)
            + (k == other) * OWN**2
            for other in range(SIZE)
        ]
        for k in range(SIZE)
    ]


_FIRST = _first_covariance()
_UNKNOWN = 4.0  # variance of the time of all k alike: nothing is known of it


@dataclass(slots=True)
class _Times:
    """Logarithms of the seconds of all k as one Gaussian estimate (a Kalman filter). A round that
    takes more than expected is by its own share news about its k, about k like it, and about the
    machine's pace, which is that of all k alike; by how uncertain each is."""

    mean: list[float]
    covariance: Matrix
    counts: dict[int, int]  # rounds by k; the first may compile, capture or touch new memory
    seen: int  # the table's round number of the last one
    # the bucket whose ratios it has, and that one's last round
    source: tuple[Bucket, int] | None = None

    @classmethod
    def unknown(cls, now: int) -> _Times:
        mean = [log(1.0 + FIRST_SLOPE * k) for k in range(SIZE)]
        return cls(mean, [[_UNKNOWN + cell for cell in row] for row in _FIRST], {}, now)

    def measured(self, k: int) -> bool:
        return self.counts.get(k, 0) > 1

    @property
    def compared(self) -> bool:
        """True when two k were measured."""
        return sum(count > 1 for count in self.counts.values()) > 1

    def like(self, other: _Times, doublings: float, noise: float) -> None:
        """Take over the ratios of another load; of this one a single k was measured at most."""
        known = next((k for k in self.counts if self.measured(k)), None)
        offset = 0.0 if known is None else self.mean[known] - other.mean[known]
        self.mean = [value + offset for value in other.mean]
        self.covariance = [[_UNKNOWN + cell for cell in row] for row in other.covariance]
        self.widen(min(1.0, WIDENING * doublings))
        if known is not None:
            self._update(known, self.mean[known], noise)

    def widen(self, share: float) -> None:
        self.covariance = [
            [cell + share * first for cell, first in zip(row, firsts, strict=True)]
            for row, firsts in zip(self.covariance, _FIRST, strict=True)
        ]

    def add(self, k: int, log_s: list[float], noise: float, now: int) -> None:
        """Add rounds that followed each other, by their median."""
        count = self.counts.get(k, 0)
        self.counts[k] = count + len(log_s)
        pace = (now - self.seen) * PACE**2
        self.seen = now
        if count == 0:
            log_s = log_s[1:]
        if not log_s:
            return
        middle = median(log_s)
        if count < 2 and not any(self.measured(other) for other in self.counts if other != k):
            self.mean = [value + middle - self.mean[k] for value in self.mean]
        if count > BELIEVED and len(log_s) >= BELIEVED:
            expected = self.covariance[k][k] + pace + noise**2 / len(log_s)
            beyond = (middle - self.mean[k]) ** 2
            if beyond > UNLIKELY**2 * expected:
                pace += beyond
                self.widen(JUMP * beyond)
        self._update(k, middle, noise, len(log_s), pace)

    def _update(
        self, k: int, log_s: float, noise: float, rounds: int = 1, pace: float = 0.0
    ) -> None:
        gains = [row[k] + pace for row in self.covariance]
        variance = gains[k] + noise**2 / rounds
        beyond = log_s - self.mean[k]
        if rounds < PROBE_ROUNDS:
            variance = max(variance, (beyond / CLIP) ** 2)
        else:
            most = CLIP * sqrt(gains[k] + noise**2)
            beyond = max(-most, min(most, beyond))
        self.mean = [
            value + gain * beyond / variance for value, gain in zip(self.mean, gains, strict=True)
        ]
        self.covariance = [
            [cell + (pace - own * gain) for cell, gain in zip(row, gains, strict=True)]
            for row, own in zip(self.covariance, [gain / variance for gain in gains], strict=True)
        ]


class LatencyTable:
    """An estimate per bucket; one that has not compared two k goes by its nearest neighbour."""

    def __init__(self) -> None:
        self._buckets: dict[Bucket, _Times] = {}
        self._rounds = 0
        self._latest: list[float] = []  # logarithms of rounds of `_kind` that are not settled yet
        self._kind: tuple[Bucket, int] | None = None
        self.noise = FIRST_NOISE

    def add(self, bucket: Bucket, k: int, seconds: float) -> None:
        """A round; cheap, for what it says is worked out when others were added, or by `settle`."""
        if self._kind != (bucket, k) or len(self._latest) == TOGETHER:
            self.settle()
            self._kind = bucket, k
        self._rounds += 1
        self._latest.append(log(seconds))

    def settle(self) -> None:
        """Take in all rounds that were added."""
        if self._kind is None or not self._latest:
            return
        bucket, k = self._kind
        latest, self._latest = self._latest, []
        self._times(bucket).add(k, latest, self.noise, self._rounds)
        if len(latest) == TOGETHER:
            middle = median(latest)
            spread = 1.25 * fmean(abs(value - middle) for value in latest)
            self.noise = max(LEAST_NOISE, 0.8 * self.noise + 0.2 * min(spread, 3.0 * self.noise))

    def begun(self, bucket: Bucket, k: int) -> bool:
        """True when there was a round of this kind; from now on there was."""
        counts = self._times(bucket).counts
        before = k in counts
        counts.setdefault(k, 1)
        return before

    def measured(self, bucket: Bucket, k: int) -> bool:
        """Never iterates, for another thread may ask; nor does `seconds` then."""
        own = self._buckets.get(bucket)
        return own is not None and own.measured(k)

    def compared(self, bucket: Bucket) -> bool:
        """True when two k were measured in this bucket or one near it."""
        own = self._times(bucket)
        return own.compared or own.source is not None

    def seconds(self, bucket: Bucket, k: int) -> float:
        """Expected seconds of a round of this bucket. Before any measurement only ratios count."""
        own = self._buckets.get(bucket)
        if own is None or not own.measured(k):
            own = self._times(bucket)
        return exp(own.mean[k])

    def variance(self, bucket: Bucket, k: int, other: int) -> float:
        """Variance of the logarithm of the ratio of two k's seconds."""
        covariance = self._times(bucket).covariance
        return covariance[k][k] + covariance[other][other] - 2.0 * covariance[k][other]

    def forget(self, bucket: Bucket, rounds: int) -> None:
        """Count the rounds since the last call as making measurements less certain."""
        self._times(bucket).widen(FORGETTING * rounds)

    def _times(self, bucket: Bucket) -> _Times:
        own = self._buckets.get(bucket)
        if own is None:
            own = self._buckets[bucket] = _Times.unknown(self._rounds)
        if own.compared:
            return own
        compared = [at for at, other in self._buckets.items() if other.compared]
        near = min(compared, key=bucket.doublings, default=None)
        if near is not None and own.source != (source := (near, self._buckets[near].seen)):
            own.like(self._buckets[near], near.doublings(bucket), self.noise)
            own.source = source
        return own
