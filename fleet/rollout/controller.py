"""Staged rollout: a new live version of the learner is tried on a part of the engines, then on a
larger one, and becomes live for all; or it is withdrawn.

It is withdrawn when paired evidence shows it worse, when engines refuse it by themselves, or when
the losslessness monitor of one alarms. Everything that is needed to go on after a kill stands in
`rollout.json`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.distill.buffer.folder import Cursor, Shard
from draftsmith.distill.buffer.traffic import SILENCE_S, OpenRequests, ServedText
from draftsmith.distill.gate.drift import acceptance
from draftsmith.distill.gate.sequential import TurningEvidence
from draftsmith.files import restored
from draftsmith.fleet.config import RolloutConfig
from draftsmith.fleet.rollout.show import SILENT_S, decided, end, running
from draftsmith.fleet.store.layout import EngineStatus, Rollout, cut_for
from draftsmith.fleet.store.store import VersionStore

logger = logging.getLogger("draftsmith.fleet")
# Served requests that ended since the last call, of those from a time on, in seconds since 1970.
StagedTexts = Callable[[float], Iterable[ServedText]]
# log10 of the monitor's evidence against a lossless engine: honest ones pass it once in a million.
ALARM = 6.0
# Shards written a little before the stage may hold records of it by another machine's clock.
SKEW_S = 60.0
# Share of the rollout's engines that refuse the version which ends it; at least one.
FALLEN = 0.2


class Controller:
    """Args:

    stages: shares of the engines, ascending; after the last the version is live for all
    texts: served requests; without it a stage passes after `hold_s` unless engines object
    give_up: called with a withdrawn version and the reason, for the learner
    """

    def __init__(
        self,
        store: VersionStore,
        stages: Sequence[float],
        config: RolloutConfig,
        *,
        texts: StagedTexts | None = None,
        give_up: Callable[[int, int, str], None] = lambda version, live, reason: None,
        event: Callable[[str], None] = logger.info,
        clock: Callable[[], float] = time.time,
    ):
        self.store, self.stages, self.config = store, tuple(stages), config
        self.texts, self.give_up, self.event, self.clock = texts, give_up, event, clock
        self.pairs = TrialPairs()
        self.followed: tuple[int, float] | None = None  # candidate and begin of `pairs`' stage

    def offer(self, version: int) -> bool:
        """Begins a rollout of a version that the store has; a first version, and one that the
        learner goes back to, is live at once. False while another one is tried."""
        live, rollout = self.store.current_or_none(), running(self.store)
        if live is not None and version > live:
            if rollout is not None:
                return rollout.candidate == version
            self._begin(version, live)
            return True
        self.store.put_current(version)
        if rollout is not None:
            reason = f"the learner went back to version {version}"
            end(self.store, rollout, "ended", reason=reason)
        self.event(f"version {version} is live for all engines")
        return True

    def _begin(self, version: int, live: int) -> None:
        before = self.store.rollout_or_none()
        rollout = Rollout(
            candidate=version,
            live=live,
            cut=self._cut(version, 0),
            stages=self.stages,
            switch_s=self.config.switch_s,
            begun_s=self.clock(),
            decisions=before.decisions if before else (),
        )
        self._go_on(rollout, "begun")

    def _cut(self, version: int, stage: int) -> float:
        return cut_for(self.stages[stage], version, [status.engine for status in self._heard()])

    def _heard(self) -> list[EngineStatus]:
        now_s = self.clock()
        return [status for status in self.store.engines() if now_s - status.at_s <= SILENT_S]

    def _go_on(self, rollout: Rollout, decision: str, reason: str = "") -> None:
        share = rollout.stages[rollout.stage]
        self.store.put_rollout(decided(rollout, decision, reason=reason))
        self.event(f"version {rollout.candidate} is tried on {share:.0%} of the engines")

    def step(self) -> None:
        """Reads what was served and decides, if that suffices."""
        rollout = running(self.store)
        if rollout is None:
            return
        statuses = [status for status in self.store.engines() if rollout.has(status.engine)]
        objection = objections(rollout, statuses)
        if objection:
            verdict: StageVerdict | None = StageVerdict(False, objection)
        elif self.texts is not None:
            verdict = self._by_records(rollout, self.texts)
        else:
            verdict = self._by_time(rollout, statuses)
        if verdict is None or not self._is_on(rollout):
            return
        if not verdict.is_good:
            self._withdraw(rollout, verdict.reason)
        else:
            self._advance(running(self.store) or rollout, verdict.reason)

    def _is_on(self, rollout: Rollout) -> bool:
        """False where an operator ended it meanwhile: reading records takes its time."""
        found = running(self.store)
        return found is not None and (found.candidate, found.begun_s) == (
            rollout.candidate,
            rollout.begun_s,
        )

    def _by_time(self, rollout: Rollout, statuses: Sequence[EngineStatus]) -> StageVerdict | None:
        held_s = self.clock() - rollout.begun_s
        tried = [status.engine for status in statuses if has_served(status, rollout.candidate)]
        if held_s < max(self.config.hold_s, 2 * rollout.switch_s) or not tried:
            return None
        return StageVerdict(True, f"{len(tried)} engines served it and none objects")

    def _by_records(self, rollout: Rollout, texts: StagedTexts) -> StageVerdict | None:
        trial = StageTrial.from_dict(rollout.trial)
        stage = (rollout.candidate, rollout.begun_s)
        if stage != self.followed:
            self.pairs, self.followed = TrialPairs(upto=trial.upto), stage
        for text in texts(rollout.begun_s):
            self.pairs.observe(text, rollout)
        due = self.pairs.due(rollout, self.clock())
        if due > trial.upto:
            was_blind, trial.upto = trial.is_blind, due
            trial.look(self.pairs.take(due, requests=self.config.requests), drop=self.config.drop)
            if trial.is_blind and not was_blind:
                self.event(
                    f"version {rollout.candidate} waits: in {trial.upto + 1} pairs of periods no "
                    "engine recorded enough requests of both versions; give engines and --buffer "
                    "the same buffer, or leave --buffer out"
                )
            if self._is_on(rollout):
                self.store.put_rollout(dataclasses.replace(rollout, trial=trial.to_dict()))
        return trial.verdict(self.config)

    def _advance(self, rollout: Rollout, reason: str) -> None:
        stage = rollout.stage + 1
        if stage < len(rollout.stages):
            begun = dataclasses.replace(
                rollout,
                stage=stage,
                cut=self._cut(rollout.candidate, stage),
                begun_s=self.clock(),
                trial={},
            )
            self._go_on(begun, "goes on", reason)
            return
        self.store.put_current(rollout.candidate)
        end(self.store, rollout, "promoted", reason=reason)
        self.event(f"version {rollout.candidate} is live for all engines: {reason}")

    def _withdraw(self, rollout: Rollout, reason: str) -> None:
        end(self.store, rollout, "rolled back", reason=reason)
        self.event(f"version {rollout.candidate} is withdrawn: {reason}")
        self.give_up(rollout.candidate, rollout.live, reason)


def objections(rollout: Rollout, statuses: Sequence[EngineStatus]) -> str:
    """Reason to withdraw the candidate, from the part's engines; "" for none."""
    for status in statuses:
        is_alarmed = status.evidence is not None and status.evidence >= ALARM
        if status.version == rollout.candidate and is_alarmed:
            return f"the losslessness monitor of engine {status.engine} alarms"
    refusing = [status for status in statuses if rollout.candidate in status.refused]
    if len(refusing) < max(1, math.ceil(FALLEN * len(statuses))):
        return ""
    first = refusing[0]
    return (
        f"{len(refusing)} of {len(statuses)} engines refuse it; {first.engine}: "
        f"{first.refused[rollout.candidate]}"
    )


def has_served(status: EngineStatus, version: int) -> bool:
    swapped = status.last_swap
    return status.version == version or (
        swapped.get("version") == version and bool(swapped.get("ok"))
    )


class ServedTexts:
    """Reader of the texts that ended since the last call. Leaves no mark in the buffer: writers
    wait for readers that do."""

    def __init__(self, url: str):
        self.reader = BufferReader(url, leaves_marks=False)
        self.open = OpenRequests()
        self.since_s: float | None = None

    def __call__(self, since_s: float) -> Iterable[ServedText]:
        if since_s != self.since_s:
            # Another stage: what came before it is not read, or read again after a restart.
            before = (since_s - SKEW_S) * 1000
            shards = self.reader.folder.shards()
            self.reader.cursor = passed([one for one in shards if one.time_ms < before])
            self.open, self.since_s = OpenRequests(), since_s
        while True:
            reading = self.reader.read()
            self.open.add(reading.records)
            yield from self.open.take(idle_s=SILENCE_S)
            # A shard that cannot be read now is tried again at the next call.
            if not reading.more or not reading.records:
                return


def passed(shards: Iterable[Shard]) -> Cursor:
    cursor: Cursor = {}
    for shard in shards:
        cursor[shard.writer] = max(shard.number, cursor.get(shard.writer, -1))
    return cursor


WINDOW = 64  # latest differences, from which the sizes of bets are taken
# Pairs of periods without a single difference, from which on a stage waits for what may never come.
UNSEEN = 4
# After the end of a pair: records come by the second, those of a request without a last record
# after a minute of silence.
LATE_S = 90.0
SHOWN = ("gain", "is_blind")  # of a trial, beside what it goes on with


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
        return asdict(self) | {name: getattr(self, name) for name in SHOWN}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StageTrial:
        known = {name: value for name, value in values.items() if name not in SHOWN}
        return restored(cls, known)


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
