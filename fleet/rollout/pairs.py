"""Differences of acceptance between the candidate and the live version, paired within each engine
by periods of a rollout.

A request counts in the period of its first round. It is left out where it was in flight over a
switch, or was drafted for by another version than the period's: an engine may take a switch up
late, or refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.gate.drift import acceptance
from draftsmith.fleet.store.rollout import Rollout

# After the end of a pair: records come by the second, those of a request without a last record
# after a minute of silence.
LATE_S = 90.0


class Half(NamedTuple):
    engine: str
    pair: int
    is_candidate: bool


@dataclass
class TrialPairs:
    """Accepted parts of requests by engine, pair and version, until the pair is judged."""

    upto: int = -1  # the last pair that was judged
    parts: dict[Half, list[float]] = field(default_factory=dict)
    left_out: int = 0

    def observe(self, text: ServedText, rollout: Rollout) -> None:
        """Counts a request of an engine of the rollout's part."""
        engine, begun_s, ended_s = (
            text.records[0].engine,
            text.records[0].time_s,
            text.records[-1].time_s,
        )
        drafted_by = {record.draft_version for record in text.records if record.drafted}
        if begun_s < rollout.begun_s or not rollout.has(engine) or not drafted_by:
            return
        period = rollout.period(begun_s)
        is_candidate = rollout.has_candidate(engine, period)
        expected = str(rollout.candidate if is_candidate else rollout.live)
        is_across = rollout.period(ended_s) != period
        if is_across or drafted_by != {expected} or period.pair <= self.upto:
            self.left_out += 1
            return
        self.add(Half(engine, period.pair, is_candidate), acceptance(text, expected) or 0.0)

    def add(self, half: Half, accepted: float) -> None:
        self.parts.setdefault(half, []).append(accepted)

    def due(self, rollout: Rollout, now_s: float) -> int:
        """The last pair that is over, its late records included; -1 before the first."""
        return int((now_s - LATE_S - rollout.begun_s) // (2 * rollout.switch_s)) - 1

    def take(self, pair: int, *, requests: int) -> dict[str, float]:
        """Differences, candidate minus live, of the pairs up to `pair`, by a name of each; of
        engines with so many requests in both halves."""
        found: dict[str, float] = {}
        halves = [half for half in self.parts if half.pair <= pair and half.is_candidate]
        for half in sorted(halves):
            live = self.parts.get(half._replace(is_candidate=False), [])
            tried = self.parts[half]
            if min(len(live), len(tried)) >= requests:
                difference = float(np.mean(tried) - np.mean(live))
                found[f"{half.engine}/{half.pair}"] = difference
        self.parts = {half: parts for half, parts in self.parts.items() if half.pair > pair}
        self.upto = max(self.upto, pair)
        return found
