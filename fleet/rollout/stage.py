"""Verdict about one stage of a rollout, by bets that may be looked at after every pair of periods.

In each pair a coin decides which period has the candidate. If neither version is better, swapping
their names changes nothing, so that a difference d is as likely as -d: the bets of
`distill/gate/sequential.py` are fair, whatever the time of day or the requests that came. That the
candidate is worse is bet on with -d, that it is not worse by `drop` with d + drop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.gate.drift import acceptance
from draftsmith.distill.gate.sequential import TurningEvidence
from draftsmith.fleet.config import RolloutConfig
from draftsmith.fleet.store.rollout import Rollout

WINDOW = 64  # latest differences, from which the sizes of bets are taken
# Pairs of periods without a single difference, from which on a stage waits for what may never come.
UNSEEN = 4
# After the end of a pair: records come by the second, those of a request without a last record
# after a minute of silence.
LATE_S = 90.0


class StageVerdict(NamedTuple):
    is_good: bool
    reason: str


@dataclass
class StageTrial:
    pairs: int = 0
    total: float = 0.0  # of the differences
    upto: int = -1  # the last pair that is counted
    window: dict[str, float] = field(default_factory=dict)
    worse: TurningEvidence = field(default_factory=TurningEvidence)
    fine: TurningEvidence = field(default_factory=TurningEvidence)

    @property
    def gain(self) -> float:
        return self.total / self.pairs if self.pairs else 0.0

    @property
    def is_blind(self) -> bool:
        """True after `UNSEEN` pairs of periods without served requests of both versions."""
        return self.pairs == 0 and self.upto + 1 >= UNSEEN

    def look(self, differences: Mapping[str, float], *, drop: float) -> None:
        """Adds new differences, each once."""
        if not differences:
            return
        self.pairs += len(differences)
        self.total += sum(differences.values())
        kept = list(self.window.items())[-max(0, WINDOW - len(differences)) :]
        self.window = dict(kept) | dict(differences)
        self.worse.look({name: -d for name, d in self.window.items()})
        self.fine.look({name: d + drop for name, d in self.window.items()})

    def verdict(self, config: RolloutConfig) -> StageVerdict | None:
        """None while the stage goes on."""
        found = f"gain {self.gain:+.4f} in {self.pairs} pairs of periods"
        if self.worse.value * config.error >= 1:
            return StageVerdict(False, f"accepted less: {found}")
        if self.fine.value * config.error >= 1:
            return StageVerdict(True, f"not accepted less by {config.drop}: {found}")
        if self.pairs < config.pairs:
            return None
        return StageVerdict(self.gain > -config.drop, f"{found}, which does not decide it")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gain": self.gain, "is_blind": self.is_blind}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StageTrial:
        read = {name: value for name, value in values.items() if name not in ("gain", "is_blind")}
        read |= {name: TurningEvidence(**read[name]) for name in ("worse", "fine") if name in read}
        return cls(**read)


class Half(NamedTuple):
    engine: str
    pair: int
    is_candidate: bool


@dataclass
class TrialPairs:
    """Accepted parts of requests by engine, pair of periods and version, until the pair is judged.

    A request counts in the period of its first round. It is left out where it was in flight over a
    switch, or was drafted for by another version than the period's: an engine may take a switch up
    late, or refuse it.
    """

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
