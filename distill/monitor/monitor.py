"""Losslessness by engine and version: counts, z and evidence of each, and alarms.

All records together are one stream, and each engine's records of each version are one more. Stream
n, by first appearance, raises an alarm at evidence of n (n + 1) / false_alarm to 1, so that the
chance that honest engines ever raise any is at most `false_alarm`, however many versions there are
and however often one looks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.distill.gate.sequential import share_of
from draftsmith.distill.monitor.events import (
    EVENTS,
    STRENGTHS,
    Bets,
    EvidenceCounts,
    MonitorEvent,
    events_of,
    greedy_of,
    greedy_violations,
    impossible,
    is_logged,
)
from draftsmith.distill.monitor.positions import Positions, positions_of
from draftsmith.errors import UserError
from draftsmith.record import RoundRecord

# Rules whose output has the target's distribution; others are left out and counted by name.
LOSSLESS_RULES = ("chain", "block", "tree")
FALSE_ALARM = 1e-6  # chance that honest servers ever raise an alarm, over all versions
# Streams without an alarm that are kept: the latest ones. One that comes back is a new one.
MOST_STREAMS = 64
# Standard deviations of a normal distribution that leave 1 % on one side: what a bias is missed by.
MISS = 2.33
# Stands for evidence without bound, which JSON has no number for.
MOST_LOG10 = 1e6


@dataclass
class EvidenceStream:
    """Counts and bets of the records of one engine and version, "" for all records."""

    number: int  # from 1, in order of first appearance
    engine: str = ""
    version: str = ""
    positions: int = 0
    greedy: int = 0
    violations: int = 0  # tokens that cannot stand where they do
    counts: dict[str, EvidenceCounts] = field(
        default_factory=lambda: {one: EvidenceCounts() for one in EVENTS}
    )
    bets: dict[str, Bets] = field(default_factory=lambda: {one: Bets() for one in EVENTS})

    def add(self, event: MonitorEvent, chosen: np.ndarray) -> None:
        kept = chosen[event.at]
        self.counts[event.name].add(event, kept)
        self.bets[event.name].add(event, kept)

    @property
    def log_evidence(self) -> float:
        if self.violations:
            return math.inf
        logs = [self.bets[name].log_evidence for name in EVENTS]
        return float(np.logaddexp.reduce(logs)) - math.log(len(logs))

    def log_level(self, false_alarm: float) -> float:
        """Log evidence at which this stream raises an alarm."""
        return -math.log(false_alarm * share_of(self.number))

    def visible(self, name: str, false_alarm: float) -> float:
        """About the smallest bias in the share of events that these positions would show in 99 of
        100 cases; 1 without any."""
        counts = self.counts[name]
        if counts.variance <= 0:
            return 1.0
        log_money = self.log_level(false_alarm) + math.log(len(EVENTS) * len(STRENGTHS))
        deviations = math.sqrt(2 * log_money) + MISS
        return min(1.0, deviations * math.sqrt(counts.variance) / counts.count)


@dataclass
class Monitor:
    """Reads records in any order, each once, and keeps sums alone."""

    false_alarm: float
    everything: EvidenceStream = field(default_factory=lambda: EvidenceStream(1))
    streams: dict[str, EvidenceStream] = field(default_factory=dict)  # by name
    begun: int = 1  # streams so far
    alarms: dict[str, str] = field(default_factory=dict)  # by stream: what was seen
    left_out: Counter[str] = field(default_factory=Counter)  # rounds or positions, by reason

    def __post_init__(self) -> None:
        self.left_out = Counter(self.left_out)  # a dictionary, where it was saved

    def look(self, records: Sequence[RoundRecord]) -> list[str]:
        """Adds records and returns the alarms that they raise, one sentence each."""
        self._count_rounds(records)
        judged = [one for one in records if one.rule in LOSSLESS_RULES]
        positions = positions_of(judged)
        if positions is not None:
            rules = np.array([one.rule for one in judged])[positions.record]
            self._count_positions(positions, rules)
            events = events_of(positions, rules)
            for stream, chosen in self._streams_of(judged, positions):
                self._add(stream, positions, events, chosen)
        self._prune()
        return self._new_alarms()

    def _streams_of(
        self, records: Sequence[RoundRecord], positions: Positions
    ) -> Iterator[tuple[EvidenceStream, np.ndarray]]:
        """Each stream with a choice [n] of positions."""
        yield self.everything, np.ones(len(positions), dtype=bool)
        keys = [(one.engine, one.draft_version) for one in records]
        for key in dict.fromkeys(keys):
            chosen = np.array([other == key for other in keys])[positions.record]
            if not chosen.any():
                continue
            yield self._stream(*key), chosen

    def _stream(self, engine: str, version: str) -> EvidenceStream:
        """Stream of an engine and version, begun if need be, behind all others."""
        name = name_of(engine, version)
        if name not in self.streams:
            self.begun += 1
            self.streams[name] = EvidenceStream(self.begun, engine, version)
        self.streams[name] = self.streams.pop(name)
        return self.streams[name]

    def _add(
        self,
        stream: EvidenceStream,
        positions: Positions,
        events: Sequence[MonitorEvent],
        chosen: np.ndarray,
    ) -> None:
        stream.positions += int(chosen.sum())
        stream.greedy += int((greedy_of(positions) & chosen).sum())
        wrong = greedy_violations(positions) | impossible(positions)
        stream.violations += int((wrong & chosen).sum())
        for event in events:
            stream.add(event, chosen)

    def _count_rounds(self, records: Sequence[RoundRecord]) -> None:
        for one in records:
            if not one.drafted:
                continue
            if one.rule not in LOSSLESS_RULES:
                self.left_out[f"rounds of rule {one.rule or 'unknown'}"] += 1
            elif not one.p.is_logged:
                self.left_out["rounds without distributions"] += 1

    def _count_positions(self, positions: Positions, rules: np.ndarray) -> None:
        sampled = ~positions.greedy
        reasons = {
            "positions whose filters cut outside the logged tokens": sampled & ~positions.p_known,
            "positions whose drafted token has no logged p or q": (
                sampled & positions.p_known & (rules == "chain") & ~is_logged(positions)
            ),
            "positions of a block behind its first": (
                sampled & (rules == "block") & (positions.depth > 0)
            ),
            "greedy positions with a tie": positions.greedy & ~greedy_of(positions),
        }
        for reason, chosen in reasons.items():
            if chosen.any():
                self.left_out[reason] += int(chosen.sum())

    def _prune(self) -> None:
        quiet = [name for name in self.streams if name not in self.alarms]
        for name in quiet[: max(0, len(quiet) - MOST_STREAMS)]:
            del self.streams[name]

    def named(self) -> dict[str, EvidenceStream]:
        """Streams by name, all records together first."""
        return {"all": self.everything} | self.streams

    def _new_alarms(self) -> list[str]:
        new = {
            name: sentence(name, stream)
            for name, stream in self.named().items()
            if name not in self.alarms and stream.log_evidence >= stream.log_level(self.false_alarm)
        }
        self.alarms |= new
        return list(new.values())

    def numbers(self) -> dict[str, dict[str, float | str]]:
        """Values of each stream, for a status: engine and version ("" for all records), positions,
        z by event, log10 of the evidence, and 1 under `alarm` where one was raised."""
        return {
            name: {
                "engine": one.engine,
                "version": one.version,
                "positions": one.positions,
                **{f"z_{event}": counts.z for event, counts in one.counts.items()},
                "log10_evidence": min(one.log_evidence / math.log(10), MOST_LOG10),
                "alarm": float(name in self.alarms),
            }
            for name, one in self.named().items()
        }


def name_of(engine: str, version: str) -> str:
    return f"version {version or '-'}" + (f" on {engine}" if engine else "")


def sentence(name: str, stream: EvidenceStream) -> str:
    seen = ", ".join(
        f"{event} {counts.happened} for {counts.expected:.1f} (z {counts.z:+.1f})"
        for event, counts in stream.counts.items()
        if counts.count
    )
    if stream.violations:
        seen = f"{stream.violations} tokens that cannot stand where they do; {seen}"
    return f"{name} is not lossless: {seen}"


@dataclass
class Look:
    monitor: Monitor
    shards: int = 0
    records: int = 0
    seeded: int = 0  # records whose draws can be repeated, left out
    damaged: int = 0  # shards


def look(url: str, *, false_alarm: float) -> Look:
    """Reads every shard that is there now, also while servers write. Leaves no mark: writers wait
    for readers that do. Raises `UserError` where the folder cannot be read."""
    reader, found = BufferReader(url, leaves_marks=False), Look(Monitor(false_alarm))
    has_more = True
    while has_more:
        try:
            reading = reader.read()
        except OSError as error:
            raise UserError(f"buffer {url!r} cannot be read ({error}); give its folder") from error
        has_more = reading.more
        found.shards += reading.shards
        found.records += len(reading.records) + reading.seeded
        found.seeded += reading.seeded
        found.damaged += reading.damaged
        found.monitor.look(reading.records)
    return found
