"""Figures with their 95 % intervals, also by the length of the context: of the rounds that begin
with so many tokens before them. K depths.

A round belongs to the bucket that it begins in, with all that it commits, as the server counts it:
sums over the buckets are those of the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from draftsmith.kernels.acceptance import WalkedRounds, bootstrap_ratio, bounds_of, bucket_of


class Estimate(NamedTuple):
    value: float
    low: float
    high: float


def ratio(top: Sequence[float], bottom: Sequence[float], seed: int = 0) -> Estimate:
    """sum(top) / sum(bottom) with a 95 % interval over their pairs."""
    interval = bootstrap_ratio(top, bottom, seed=seed)
    return Estimate(sum(top) / sum(bottom), interval.low, interval.high)


def reached_ratio(top: Sequence[float], bottom: Sequence[float], seed: int = 0) -> Estimate | None:
    """`ratio` over the pairs whose bottom is more than 0; None without any."""
    pairs = [(over, under) for over, under in zip(top, bottom, strict=True) if under > 0]
    if not pairs:
        return None
    return ratio([over for over, _ in pairs], [under for _, under in pairs], seed)


class ContextCounts(NamedTuple):
    """Expected sums over the rounds of a document that begin in one bucket."""

    rounds: float
    committed: float
    offered: list[float]  # [K]
    accepted: list[float]  # [K]

    def plus(self, other: ContextCounts) -> ContextCounts:
        return ContextCounts(
            self.rounds + other.rounds,
            self.committed + other.committed,
            [a + b for a, b in zip(self.offered, other.offered, strict=True)],
            [a + b for a, b in zip(self.accepted, other.accepted, strict=True)],
        )


ByContext = Mapping[int, ContextCounts]  # by number of the bucket


class Acceptance(NamedTuple):
    tau: Estimate
    alpha: list[Estimate | None]  # entry i is alpha_(i+1); None where no round reaches it


class ContextFigures(NamedTuple):
    """Figures of one bucket [begin, end) of context lengths, in tokens."""

    begin: int
    end: int
    documents: int
    rounds: float
    tokens: float  # committed in them
    tau: Estimate
    alpha: list[Estimate | None]  # as in `Acceptance`


def count_by_context(walked: WalkedRounds, begin: int) -> dict[int, ContextCounts]:
    """Counts of a text whose first token stands at position `begin`."""
    found: dict[int, ContextCounts] = {}
    for bucket in range(bucket_of(begin), bucket_of(begin + len(walked.rounds) - 1) + 1):
        first, end = bounds_of(bucket)
        part = slice(max(0, first - begin), end - begin)
        found[bucket] = ContextCounts(
            float(walked.rounds[part].sum()),
            float(walked.committed[part].sum()),
            walked.offered[part].sum(dim=0).tolist(),
            walked.accepted[part].sum(dim=0).tolist(),
        )
    return found


def merge_contexts(some: ByContext, others: ByContext) -> dict[int, ContextCounts]:
    merged = dict(some)
    for bucket, counts in others.items():
        merged[bucket] = merged[bucket].plus(counts) if bucket in merged else counts
    return merged


def summarise_contexts(
    documents: Sequence[ByContext], seed: int, *, whole: Acceptance
) -> list[ContextFigures]:
    """Figures of each bucket that a round begins in, the shortest first; intervals over the
    documents that reach it. `whole` is of all buckets together."""
    by_bucket = {
        # A bucket may begin inside the last round of a text.
        bucket: [one[bucket] for one in documents if bucket in one and one[bucket].rounds > 0]
        for bucket in sorted(set().union(*documents))
    }
    reached = {bucket: counts for bucket, counts in by_bucket.items() if counts}
    return [
        ContextFigures(
            *bounds_of(bucket),
            len(counts),
            sum(one.rounds for one in counts),
            sum(one.committed for one in counts),
            *(whole if len(reached) == 1 else _acceptance(counts, seed)),
        )
        for bucket, counts in reached.items()
    ]


def _acceptance(counts: Sequence[ContextCounts], seed: int) -> Acceptance:
    return Acceptance(
        ratio([one.committed for one in counts], [one.rounds for one in counts], seed),
        [
            reached_ratio(
                [one.accepted[depth] for one in counts],
                [one.offered[depth] for one in counts],
                seed,
            )
            for depth in range(len(counts[0].offered))
        ],
    )
