"""The only definition of alpha and tau in the project, for the trainer, the evaluator, the server
and the gate; of distributions in `overlap.py`. Torch-free.

alpha = sum_v min(p_v, q_v) is the chance that a drafted token stands; tau is committed tokens per
target forward, the bonus token included. Acceptance is counted apart by buckets of context length:
below 256 tokens, then up to each power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Z_95 = 1.959963984540054


class DraftCost(NamedTuple):
    """Bytes of weights read while drafting, in those of a target pass."""

    proposal: float  # by a proposal of any length
    token: float  # besides, by each token of it

    def memory_bound(self, tau: float, depth: float) -> float:
        """Memory-bound speed-up (MBSU) of rounds of `depth` drafted tokens: tau over what a round
        reads."""
        return tau / (1 + self.proposal + depth * self.token)


class Interval(NamedTuple):
    low: float
    high: float


def wilson(successes: int, trials: int, z: float = Z_95) -> Interval:
    """Wilson's score interval of a proportion; (0, 1) without trials."""
    if trials == 0:
        return Interval(0.0, 1.0)
    rate, shrink = successes / trials, 1 + z * z / trials
    middle = (rate + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / shrink
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def bootstrap_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *over: Sequence[float],
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """95 % interval of sum(numerators) / sum(denominators) by resampling whole units (texts,
    requests), which may depend within; `over`, two more sequences of the same units, which are
    drawn together: of that ratio over theirs."""
    ones = [1.0] * len(numerators)
    columns = (numerators, denominators, *(over or (ones, ones)))
    lengths = {len(column) for column in columns}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"{len(numerators)} numerators and {len(denominators)} denominators; give one pair a "
            "unit, at least one"
        )
    values, generator = np.array(columns, dtype=np.float64), np.random.default_rng(seed)
    found, count = [], values.shape[1]
    # So many resamples at once that their indices stay small.
    for begin in range(0, resamples, step := max(1, 2**20 // count)):
        chosen = generator.integers(count, size=(min(step, resamples - begin), count))
        top, bottom, over_top, over_bottom = (column[chosen].sum(axis=1) for column in values)
        with np.errstate(all="ignore"):  # units without a denominator may be drawn alone
            found.append(top / bottom / (over_top / over_bottom))
    return Interval(*np.quantile(np.concatenate(found), [0.025, 0.975]).tolist())


@dataclass
class AcceptanceCounts:
    """Sums over rounds. Position i counts as offered only where every position before it was
    accepted."""

    # [K] rounds whose position i was before the target with its prefix kept
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # [K] of those, rounds that kept it
    # committed tokens of a round -> number of such rounds
    committed: dict[int, int] = field(default_factory=dict)

    def add(
        self,
        offered: Sequence[int],
        accepted: Sequence[int],
        committed: Sequence[int],
        times: int = 1,
    ) -> None:
        """One entry per round, or for so many `times` alike: tokens offered, tokens kept, tokens
        committed after stop and EOS trimming."""
        for num_offered, num_accepted, num_committed in zip(
            offered, accepted, committed, strict=True
        ):
            if not 0 <= num_accepted <= num_offered:
                raise ValueError(
                    f"a round accepted {num_accepted} of {num_offered} offered tokens; it cannot"
                )
            if num_offered > len(self.offered):
                self._reserve(num_offered)
            for position in range(min(num_offered, num_accepted + 1)):
                self.offered[position] += times
            for position in range(num_accepted):
                self.accepted[position] += times
            self.committed[num_committed] = self.committed.get(num_committed, 0) + times

    def merge(self, other: AcceptanceCounts) -> None:
        self._reserve(len(other.offered))
        for position, (num_offered, num_accepted) in enumerate(zip(other.offered, other.accepted)):
            self.offered[position] += num_offered
            self.accepted[position] += num_accepted
        for num_committed, count in other.committed.items():
            self.committed[num_committed] = self.committed.get(num_committed, 0) + count

    def copy(self) -> AcceptanceCounts:
        """Counts at this moment. Another thread may be counting."""
        accepted = list(self.accepted)
        return AcceptanceCounts(self.offered[: len(accepted)], accepted, dict(self.committed))

    def since(self, before: AcceptanceCounts) -> AcceptanceCounts:
        """Counts of the rounds that came after `before`, an earlier copy."""
        missing = [0] * (len(self.offered) - len(before.offered))
        offered, accepted = (
            [count - earlier for count, earlier in zip(counts, counts_before + missing)]
            for counts, counts_before in (
                (self.offered, before.offered),
                (self.accepted, before.accepted),
            )
        )
        sizes = {size: n - before.committed.get(size, 0) for size, n in self.committed.items()}
        # Of a round that was half counted, no more are accepted than were offered.
        return AcceptanceCounts(offered, list(map(min, accepted, offered)), sizes)

    def _reserve(self, depth: int) -> None:
        missing = depth - len(self.offered)
        if missing > 0:
            self.offered += [0] * missing
            self.accepted += [0] * missing

    @property
    def rounds(self) -> int:
        return sum(self.committed.values())

    @property
    def num_committed(self) -> int:
        return sum(size * count for size, count in self.committed.items())

    @property
    def alpha(self) -> list[float | None]:
        """alpha_i; None where position i was never offered."""
        return [kept / tried if tried else None for kept, tried in zip(self.accepted, self.offered)]

    @property
    def alpha_intervals(self) -> list[Interval]:
        return [wilson(kept, tried) for kept, tried in zip(self.accepted, self.offered)]

    @property
    def tau(self) -> float | None:
        return self.num_committed / self.rounds if self.rounds else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "committed": self.num_committed,
            "offered": list(self.offered),
            "accepted": list(self.accepted),
            "alpha": self.alpha,
            "tau": self.tau,
        }


FIRST = 256  # tokens of the first bucket
KILO = 1024


def bucket_of(context: int) -> int:
    """Number of the bucket of a round with `context` tokens before the first that it decides."""
    return (context // FIRST).bit_length()


def bounds_of(bucket: int) -> tuple[int, int]:
    """[begin, end) of a bucket, in tokens."""
    return (FIRST << bucket) // 2 if bucket else 0, FIRST << bucket


def label_of(bucket: int) -> str:
    """`0-256`, `256-512`, `512-1k`, `1k-2k`, ..."""
    return "-".join(_short(bound) for bound in bounds_of(bucket))


def _short(tokens: int) -> str:
    return f"{tokens // KILO}k" if tokens >= KILO else str(tokens)
