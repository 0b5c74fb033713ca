"""History of a server: differences of the engine's plain counters over intervals, kept in rings of
bounded size.

A thread of its own reads the counters every other second, so that history costs the rounds nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.serve.control.auto import AutoControl
from draftsmith.serve.control.latency import LatencyTable, bucket_of
from draftsmith.serve.engine.engine import Engine

EVERY_S = 2.0
RECENT = 450  # points of `EVERY_S` seconds: a quarter of an hour
COARSE_S = 60.0
DAY = 1440  # points of `COARSE_S` seconds
NOW_S = 60.0  # the latest seconds, summed up as the present

Point = dict[str, Any]  # one interval, ready for JSON: see `Point` in schema.py


class Counts(NamedTuple):
    """Rounds that drafted, summed up to a moment or between two."""

    rounds: int = 0
    committed: int = 0
    # [K] rounds whose position i was before the target with its prefix kept
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()  # [K] of those, rounds that kept it

    @classmethod
    def of(cls, acceptance: AcceptanceCounts) -> Counts:
        # Copied before they are walked through: another thread goes on counting.
        accepted, reached, sizes = (
            tuple(acceptance.accepted),
            tuple(acceptance.offered),
            dict(acceptance.committed),
        )
        return cls(
            sum(sizes.values()),
            sum(size * count for size, count in sizes.items()),
            reached,
            accepted,
        )

    @classmethod
    def total(cls, parts: Sequence[Counts]) -> Counts:
        depth = max((len(part.reached) for part in parts), default=0)
        reached = tuple(
            sum(_at(part.reached, position) for part in parts) for position in range(depth)
        )
        accepted = tuple(
            sum(_at(part.accepted, position) for part in parts) for position in range(depth)
        )
        return cls(
            sum(part.rounds for part in parts),
            sum(part.committed for part in parts),
            reached,
            accepted,
        )

    def since(self, earlier: Counts) -> Counts:
        reached = tuple(
            count - _at(earlier.reached, position) for position, count in enumerate(self.reached)
        )
        accepted = tuple(
            # A round may have been half counted when it was read.
            min(_at(self.accepted, position) - _at(earlier.accepted, position), count)
            for position, count in enumerate(reached)
        )
        return Counts(
            self.rounds - earlier.rounds, self.committed - earlier.committed, reached, accepted
        )

    @property
    def tau(self) -> float | None:
        return self.committed / self.rounds if self.rounds else None

    @property
    def alpha(self) -> list[float | None]:
        return [kept / tried if tried else None for kept, tried in zip(self.accepted, self.reached)]

    def rates(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "tau": self.tau, "alpha": self.alpha}


def _at(counts: Sequence[int], position: int) -> int:
    return counts[position] if position < len(counts) else 0


@dataclass(frozen=True)
class Sample:
    """Counters at a moment."""

    time_s: float  # since the epoch
    generated: int
    busy_s: float  # in rounds
    rounds_by_k: dict[int, int]
    drafting: Counts
    by_class: dict[str, Counts]  # of finished requests

    @classmethod
    def of(cls, engine: Engine, by_class: Mapping[str, AcceptanceCounts]) -> Sample:
        stats = engine.stats
        return cls(
            time.time(),
            stats.num_generation_tokens,
            sum(dict(stats.time_s).values()),
            dict(stats.rounds_by_k),
            Counts.of(stats.acceptance),
            {name: Counts.of(counts) for name, counts in dict(by_class).items()},
        )


class Span:
    """The latest `kept` intervals of `every_s` seconds."""

    def __init__(self, every_s: float, kept: int):
        self.every_s, self.points = every_s, deque[Point](maxlen=kept)
        self._last: Sample | None = None

    def add(self, engine: Engine, sample: Sample) -> None:
        if self._last is None:
            self._last = sample
        # A twentieth early is in time: the clock that wakes the sampler is not exact.
        elif sample.time_s - self._last.time_s >= 0.95 * self.every_s:
            self.points.append(point(engine, self._last, sample))
            self._last = sample

    def since(self, time_s: float) -> list[Point]:
        return [one for one in list(self.points) if one["time_s"] > time_s]


class History:
    """Two spans, `recent` fine and `day` coarse, filled by a thread of their own."""

    def __init__(self, engine: Engine, by_class: Mapping[str, AcceptanceCounts]):
        self.engine, self.by_class = engine, by_class
        self.recent, self.day = Span(EVERY_S, RECENT), Span(COARSE_S, DAY)
        self.look()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftsmith-history", daemon=True)

    def start(self) -> History:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()

    def look(self) -> None:
        sample = Sample.of(self.engine, self.by_class)
        self.recent.add(self.engine, sample)
        self.day.add(self.engine, sample)

    def _run(self) -> None:
        while not self._stopped.wait(EVERY_S):
            self.look()


def point(engine: Engine, before: Sample, after: Sample) -> Point:
    drafting = after.drafting.since(before.drafting)
    tokens, busy_s = after.generated - before.generated, after.busy_s - before.busy_s
    by_k = {k: count - before.rounds_by_k.get(k, 0) for k, count in after.rounds_by_k.items()}
    control, scheduler = engine.scheduler.control, engine.scheduler
    plain_s = None
    if isinstance(control, AutoControl):
        plain_s = plain_seconds(
            control.latency, busy_s=busy_s, tokens=tokens, drafting=drafting, rounds_by_k=by_k
        )
    classes = {
        name: counts.since(before.by_class.get(name, Counts()))
        for name, counts in after.by_class.items()
    }
    return {
        "time_s": after.time_s,
        "seconds": after.time_s - before.time_s,
        "tokens": tokens,
        "busy_s": busy_s,
        "plain_s": plain_s,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "kv_usage": scheduler.blocks.usage,
        "draft_version": engine.stats.draft_version,
        "drafting": drafting._asdict(),
        "classes": {name: counts._asdict() for name, counts in classes.items() if counts.rounds},
    }


def plain_seconds(
    latency: LatencyTable,
    *,
    busy_s: float,
    tokens: int,
    drafting: Counts,
    rounds_by_k: Mapping[int, int],
) -> float | None:
    """Seconds that these rounds would have taken without drafts, as measured while serving; None
    where that was not measured.

    Each round costs what its drafts cost less, and every token beyond one per row costs its share
    of another plain round.
    """
    ks = {k: count for k, count in rounds_by_k.items() if count > 0}
    rounds = sum(ks.values())
    if rounds == 0 or tokens == 0:
        return None
    passes = tokens - drafting.committed + drafting.rounds  # each row's share of a round
    rows = max(1.0, passes / rounds)
    bucket = bucket_of(round(rows))
    # Only what was measured is looked up: the table would walk through its cells for the rest,
    # while the engine adds to them.
    if not all(latency.measured(bucket, k) for k in {0, *ks}):
        return None
    plain_round_s = latency.seconds(bucket, 0)
    drafts_s = sum(count * (latency.seconds(bucket, k) - plain_round_s) for k, count in ks.items())
    return max(0.0, busy_s - drafts_s) + (tokens - passes) / rows * plain_round_s


def summary(points: Sequence[Point]) -> dict[str, Any]:
    """Rates of points taken together. Busy speeds are those while there was work, so that an idle
    server does not appear slow."""
    counts = Counts.total([Counts(**one["drafting"]) for one in points])
    seconds, tokens = sum(one["seconds"] for one in points), sum(one["tokens"] for one in points)
    busy_s = sum(one["busy_s"] for one in points)
    known = [one for one in points if one["plain_s"] is not None]
    known_s, plain_s = sum(one["busy_s"] for one in known), sum(one["plain_s"] for one in known)
    speed = tokens / busy_s if busy_s else None
    gain = plain_s / known_s if known_s else None
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds else None,
        "busy_tokens_per_s": speed,
        "plain_tokens_per_s": speed / gain if speed and gain else None,
        "speedup": gain,
        **counts.rates(),
    }


def by_class(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    parts: dict[str, list[Counts]] = {}
    for one in points:
        for name, counts in one["classes"].items():
            parts.setdefault(name, []).append(Counts(**counts))
    return {name: Counts.total(parts[name]).rates() for name in sorted(parts)}
