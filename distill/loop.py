"""The daemon's loop: read, train, decide, watch, save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from draftsmith.config import to_dict
from draftsmith.distill import learner as learning
from draftsmith.distill.buffer import BufferReader
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.drift import Drift
from draftsmith.distill.folder import retain
from draftsmith.distill.gate import Decision, decide
from draftsmith.distill.learner import Learner, UpdateReport
from draftsmith.distill.place import load_target
from draftsmith.distill.publisher import Publisher
from draftsmith.distill.quarantine import enough, regate, signature
from draftsmith.distill.regression import Watched, served_by, watch
from draftsmith.distill.scoring import Scorer
from draftsmith.distill.sequential import Ledger
from draftsmith.distill.state import Counters, StateFolder, TrafficState
from draftsmith.distill.status import Status, describe
from draftsmith.distill.throttle import Throttle
from draftsmith.distill.traffic import OpenRequests, ServedText, is_held_out, remembered
from draftsmith.drafters import versions
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.errors import UserError
from draftsmith.version import __version__

RETENTION_S = 30.0


class Daemon:
    """Every part of a cycle may fail for want of disk without ending the loop."""

    def __init__(self, config: DistillConfig, status: Status, throttle: Throttle):
        self.config, self.status, self.throttle = config, status, throttle
        self.root = Path(config.versions)
        self.target_files = signature(config.target)
        self.is_outdated = False  # the servers run weights that have come into the target's folder since
        self.target = load_target(config.target, dtype=config.dtype, device=config.device)
        self.publisher = Publisher(self.root, config.draft, self.target)
        candidate = self.publisher.load(versions.folder_of(self.root, self.publisher.version))
        self.learner = Learner(candidate, self.target, config.learn, seed=config.seed)
        self.reader = BufferReader(config.buffer)
        self.saves = StateFolder(self.root)
        self.counters, self.fresh, self.window, self.open = Counters(), [], [], OpenRequests()
        self.forgotten: frozenset[str] = frozenset()
        self.ledger, self.drift = Ledger(), Drift(config.drift)
        self.since_watch = 0  # held-out texts since the last look at the live version
        self.saved_s = self.retained_s = self.active_s = time.monotonic()
        self.report: UpdateReport | None = None
        self.watched: Watched | None = None
        self._new_scorers()
        self._restore()
        self.judge_target()
        self.saved_cursor = dict(self.reader.cursor)

    def _restore(self) -> None:
        restored = self.saves.restore(self.learner, target_revision=self.target.revision)
        if restored is None:
            return
        self.reader.cursor = dict(restored.cursor)
        self.counters, self.ledger = restored.counters, restored.ledger
        self.fresh, self.window = restored.traffic.fresh, restored.traffic.window
        self.open = OpenRequests(restored.traffic.open)
        if restored.live_version != self.publisher.version:
            self._new_live_version()
        self.status.event(f"goes on after update {self.counters.updates}, version {self.publisher.version} is live")

    def _new_scorers(self) -> None:
        live, parent = self.publisher.live, self.publisher.parent
        self.live = Scorer(live, self.target, max_length=self.length)
        self.parent = Scorer(parent, self.target, max_length=self.length) if parent is not None else None

    # The loop.

    def loop(self, stop: threading.Event) -> None:
        self.active_s = time.monotonic()
        while not stop.is_set() and not self.is_done() and not self.is_outdated:
            if self.guarded(self.cycle):
                self.active_s = time.monotonic()
            else:
                stop.wait(self.config.poll_s)
        if not stop.is_set() and not self.is_outdated and self.config.until_idle_s is not None:
            self.guarded(self.finish)
        self.guarded(self.save)
        self.status.event(f"stopped after {self.counters.updates} updates, version {self.publisher.version} is live")

    def finish(self) -> None:
        """The traffic is over: what waited for company is trained on, and the last candidate is judged."""
        for text in self.open.take(idle_s=0.0):
            self.sort_in(text)
        if self.fresh:
            self.update()
            self.counters.is_gate_due = True
        if self.counters.is_gate_due:
            self.gate()
        self.show()

    def is_done(self) -> bool:
        limit, idle_s = self.config.max_updates, self.config.until_idle_s
        if limit is not None and self.counters.updates >= limit:
            return True
        return idle_s is not None and time.monotonic() - self.active_s > idle_s

    def guarded(self, work: Callable[[], object]) -> bool:
        """A full disk or an unreachable buffer is waited out."""
        try:
            return bool(work())
        except OSError as error:
            self.status.event(f"{error}; trying again")
            return False

    def cycle(self) -> bool:
        """True when there was something to do."""
        self.follow()
        self.forget()
        arrived = self.take_in()
        has_update = len(self.fresh) >= self.config.learn.fresh and not self.drift.is_resting
        if has_update:
            self.update()
            self.counters.is_gate_due |= self.counters.updates % self.config.gate.every == 0
        if self.counters.is_gate_due and len(self.window) >= self.config.gate.requests:
            with self.throttle.work():
                self.gate()
        if self.since_watch >= self.config.gate.requests:
            with self.throttle.work():
                self.watch()
        if has_update and time.monotonic() - self.saved_s >= self.config.save_s:
            self.save()
        self.retain()
        self.show()
        return arrived or has_update

    def follow(self) -> None:
        """Somebody else may have chosen another version: what servers run is what `current` says."""
        if versions.latest(self.root) == self.publisher.version:
            return
        left = self.publisher.version
        self.publisher.reload()
        self.status.event(f"version {self.publisher.version} was chosen instead of {left}; learning goes on from it")
        self._new_live_version()
        self.start_over()

    def forget(self) -> None:
        """What was taken out of the buffer on demand leaves this process and its saved state too."""
        answers = self.reader.forgotten()
        if answers == self.forgotten:
            return
        self.open.forget(answers)
        self.fresh, self.window = remembered(self.fresh, answers), remembered(self.window, answers)
        self.learner.reservoir.texts = remembered(self.learner.reservoir.texts, answers)
        self.save()
        self.forgotten = answers
        self.status.event(f"{len(answers)} answers are forgotten")

    def take_in(self) -> bool:
        reading = self.reader.read()
        self.counters.records += len(reading.records)
        self.counters.damaged_shards += reading.damaged
        own = [record for record in reading.records if record.target_revision in ("", self.target.revision)]
        if len(own) < len(reading.records):
            if not self.counters.foreign:
                self.status.event(f"records of another target than {self.target.name!r} are left out")
            self.counters.foreign += len(reading.records) - len(own)
            self.is_outdated = signature(self.config.target) != self.target_files
        self.open.add(own)
        for text in self.open.take(idle_s=self.config.idle_s):
            self.sort_in(text)
        return bool(reading.records)

    def sort_in(self, text: ServedText) -> None:
        self.look_for_drift(text)
        if is_held_out(text, self.config.gate.held_out):
            self.counters.held_out += 1
            if text.is_scorable:
                self.window = [*self.window, text][-self.config.gate.window :]
                self.since_watch += 1
        else:
            # More than the reservoir holds would only be waited for: the newest traffic matters most.
            self.fresh = [*self.fresh, text.slim()][-self.config.learn.reservoir :]

    def look_for_drift(self, text: ServedText) -> None:
        alarm = self.drift.observe(text, self.publisher.version)
        if alarm is not None:
            self.counters.drift_alarms += 1
            versions.record_decision(self.root, {"decision": "drift", "reason": alarm.describe(), **asdict(alarm)})
            self.status.event(f"drift: {alarm.describe()}")

    # Learning.

    def update(self) -> None:
        self.report = self.learner.update(self.fresh, self.throttle.rest)
        self.counters.texts += len(self.fresh)
        self.counters.updates += 1
        self.fresh = []
        if self.report.broken >= learning.MAX_BROKEN_STEPS:
            self.decided(Decision("refuse", "training gave gradients that are not finite"))
            self.start_over()

    def start_over(self) -> None:
        """The candidate becomes the live draft again."""
        self.learner.restart(self.publisher.live.state_dict())
        self.ledger.gate.new_candidate()

    @property
    def depth(self) -> int:
        return max((len(record.drafted) for text in self.window for record in text.records), default=1)

    @property
    def length(self) -> int:
        return min(self.config.learn.max_length, self.target.max_positions)

    def gate(self) -> None:
        candidate, evidence = self.learner.drafter, self.ledger.gate
        decision = decide(self.live, candidate, self.window, self.config.gate, max_depth=self.depth, evidence=evidence)
        if self.made_for:
            decision = enough(decision, self.config.gate)
        if decision.decision == "accept":
            self.publish(decision, self.learner.drafter)
            self.counters.is_gate_due = False
            return
        self.counters.is_gate_due = False
        self.decided(decision)
        if decision.decision == "refuse" or self.has_fallen_behind(decision):
            self.start_over()

    def has_fallen_behind(self, decision: Decision) -> bool:
        """A candidate that is worse with evidence would take long to come back; the live draft is the better start."""
        comparison = decision.comparison
        return comparison is not None and comparison.gain < 0 and comparison.p_value <= self.config.gate.error

    def publish(self, decision: Decision, drafter: TrainedDrafter) -> None:
        self.save()
        training = {"version": __version__, "online": to_dict(self.config.learn), "updates": self.counters.updates}
        try:
            version = self.publisher.publish(
                drafter,
                training=training,
                data_range={"records": self.counters.records, "texts": self.counters.texts, "cursor": self.reader.cursor},
                gate=decision.to_dict(),
            )
        except UserError as error:
            self.decided(replace(decision, decision="refuse", reason=f"the written candidate cannot be read back: {error}"))
            self.start_over()
            return
        self.decided(decision, version=version)
        self._new_live_version()
        self.save()
        versions.prune(self.root, keep=self.config.retention.versions)

    def _new_live_version(self) -> None:
        """Error budgets and the watch count from here."""
        self._new_scorers()
        self.learner.live_changed(self.publisher.live.state_dict())
        self.judge_target()
        self.ledger = Ledger()
        self.drift.new_version()
        self.since_watch = 0

    def decided(self, decision: Decision, *, version: int | None = None) -> None:
        """Every decision with its numbers: a line for people, a line in decisions.jsonl."""
        numbers = {**decision.to_dict(), "live": self.publisher.parent_version if version else self.publisher.version}
        versions.record_decision(self.root, {**numbers, "version": version, "updates": self.counters.updates})
        self.counters.count(decision.decision)
        self.status.event(describe(decision, version))
        if self.drift.judged(promoted=version is not None):
            self.status.event(f"{self.drift.fruitless} decisions without a promotion; learning rests until the traffic changes")

    def watch(self) -> None:
        """Looks at what the live version did since it went live."""
        self.since_watch = 0
        if self.made_for:
            self.regate()
            return
        texts = served_by(self.window, self.publisher.version)
        if len(texts) < self.config.gate.requests:
            return
        self.watched = watch(
            self.live,
            self.parent,
            texts,
            self.config.gate,
            version=self.publisher.version,
            max_depth=self.depth,
            evidence=self.ledger,
        )
        if self.watched.reason and self.publisher.parent is not None:
            self.roll_back(self.watched)

    # Another target.

    def judge_target(self) -> None:
        """`made_for` is the revision of the target that the live version was made for, where that is another one."""
        self.made_for = versions.stranger(self.root, self.publisher.version, self.target.revision)
        if not self.made_for:
            return
        told = {"decision": "quarantine", "version": self.publisher.version, "target_revision": self.target.revision}
        if any(told.items() <= one.items() for one in versions.read_decisions(self.root)):
            return
        reason = f"made for target revision {self.made_for}, this is {self.target.revision}"
        versions.record_decision(self.root, {**told, "reason": reason})
        self.status.event(f"version {self.publisher.version} is in quarantine: {reason}")

    def regate(self) -> None:
        """The same draft as a version for this target, if its traffic shows it good enough."""
        decision = regate(self.live, self.window, self.config.gate, max_depth=self.depth)
        if decision.decision == "accept":
            self.publish(decision, self.publisher.live)
        else:
            self.decided(decision)

    def roll_back(self, watched: Watched) -> None:
        left = self.publisher.version
        version = self.publisher.roll_back(watched.reason)
        self.counters.rolled_back += 1
        versions.record_decision(self.root, {"decision": "rolled back", "left": left, "version": version, **watched.to_dict()})
        self.status.event(f"version {left} is rolled back to {version}: {watched.reason}")
        self._new_live_version()
        self.start_over()
        self.save()

    # Keeping.

    def save(self) -> None:
        self.saves.save(
            self.learner,
            cursor=self.reader.cursor,
            counters=self.counters,
            ledger=self.ledger,
            live_version=self.publisher.version,
            target_revision=self.target.revision,
            traffic=TrafficState(self.open.all_records(), self.fresh, self.window),
            with_records=not self.reader.folder.is_memory,
        )
        self.saved_cursor, self.saved_s = dict(self.reader.cursor), time.monotonic()

    def retain(self) -> None:
        """Only what a restart would not read again counts as read."""
        if time.monotonic() - self.retained_s < RETENTION_S:
            return
        limits = self.config.retention
        retain(self.reader.folder, self.saved_cursor, max_bytes=limits.bytes, max_age_s=limits.age_s)
        self.reader.forget_gone_writers()
        self.retained_s = time.monotonic()

    def show(self) -> None:
        self.counters.orphans = self.open.orphans
        report, watched = self.report, self.watched
        alpha = report.alpha if report else []
        line = (
            f"version {self.publisher.version}, {self.counters.updates} updates, {self.counters.texts} texts, "
            f"{len(self.window)} held out, waiting {len(self.fresh)}"
            + (f", loss {report.loss:.3f}, alpha {alpha[0]:.3f}" if report else "")
        )
        values = {
            "version": self.publisher.version,
            **to_dict(self.counters),
            "fresh": len(self.fresh),
            "window": len(self.window),
            "reservoir": len(self.learner.reservoir.texts),
            "loss": report.loss if report else None,
            "alpha_training": alpha,
            "live": watched.to_dict() if watched else None,
            "drift": self.drift.to_dict(),
            "resting": self.drift.is_resting,
            "quarantined": bool(self.made_for),
            "share": self.throttle.share,
            "worked_s": self.throttle.worked_s,
            "rested_s": self.throttle.rested_s,
        }
        self.status.show(line, values)
