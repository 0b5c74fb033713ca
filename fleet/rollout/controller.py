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
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.distill.buffer.folder import Cursor, Shard
from draftsmith.distill.buffer.traffic import SILENCE_S, OpenRequests, ServedText
from draftsmith.fleet.config import RolloutConfig
from draftsmith.fleet.rollout.operate import decided, end, running
from draftsmith.fleet.rollout.show import SILENT_S
from draftsmith.fleet.rollout.stage import StageTrial, StageVerdict, TrialPairs
from draftsmith.fleet.store.layout import EngineStatus
from draftsmith.fleet.store.rollout import Rollout, cut_for
from draftsmith.fleet.store.store import VersionStore

logger = logging.getLogger("draftsmith.fleet")
# log10 of the monitor's evidence against a lossless engine: honest ones pass it once in a million.
ALARM = 6.0
# Shards written a little before the stage may hold records of it by another machine's clock.
SKEW_S = 60.0


class StagedTexts(Protocol):
    """Source of served requests that ended since the last call, from those of `since_s` on."""

    def __call__(self, since_s: float) -> Iterable[ServedText]: ...


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
        objection = objections(rollout, statuses, self.config.fallen)
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


def objections(rollout: Rollout, statuses: Sequence[EngineStatus], fallen: float) -> str:
    """Reason to withdraw the candidate, from the part's engines; "" for none."""
    for status in statuses:
        is_alarmed = status.evidence is not None and status.evidence >= ALARM
        if status.version == rollout.candidate and is_alarmed:
            return f"the losslessness monitor of engine {status.engine} alarms"
    refusing = [status for status in statuses if rollout.candidate in status.refused]
    if len(refusing) < max(1, math.ceil(fallen * len(statuses))):
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
