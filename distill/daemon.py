"""Loop of the daemon: read, train and decide, save, show status."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.distill.buffer.folder import retain
from draftsmith.distill.buffer.record_table import is_of_weights, of_earlier_weights
from draftsmith.distill.buffer.traffic import (
    SILENCE_S,
    OpenRequests,
    ServedText,
    check_recorded,
    is_held_out,
    numbers,
)
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.draft_track import DraftTrack
from draftsmith.distill.learn.teachers import open_target
from draftsmith.distill.learn.text_states import TargetFolder, states_of
from draftsmith.distill.monitor.monitor import FALSE_ALARM, Monitor
from draftsmith.distill.state import (
    LEARNER,
    LearnerContext,
    LearnerCounters,
    LearnerState,
    StateFolder,
)
from draftsmith.distill.status import Status
from draftsmith.distill.throttle import Throttle
from draftsmith.drafters import versions
from draftsmith.files import sweep
from draftsmith.record import RoundRecord

RETENTION_S = 30.0
MAX_RECORDS = 4096  # of a look into the buffer


class Daemon:
    """Owner of the track, the reader, the saved state and the status. A full disk may fail every
    part of a cycle without ending the loop."""

    def __init__(self, config: DistillConfig, status: Status, throttle: Throttle):
        self.config, self.status, self.throttle = config, status, throttle
        self.root = Path(config.versions)
        for folder in (self.root, self.root / LEARNER):
            sweep(folder)
        self.source = TargetFolder(config.target)
        # other weights have come into the target's folder since
        self.is_outdated = False
        self.revisions: list[str] = []  # that the target had before
        self.target = open_target(config, self.source.folder)
        self.counters, self.open = LearnerCounters(), OpenRequests()
        self.monitor = Monitor(FALSE_ALARM)
        self.states = states_of(self.target, config.learn)
        context = LearnerContext(
            config,
            self.target,
            throttle,
            self.counters,
            status.event,
            self.save,
            lambda: self.reader.cursor,
            self.states,
        )
        self.track = DraftTrack(context)
        taps = self.track.learner.teacher.taps
        self.reader = BufferReader(config.buffer, with_taps=bool(taps))
        if taps:
            check_recorded(self.reader.folder, taps)
        self.saves = StateFolder(self.root)
        throttle.look_up = lambda: self.guarded(self.look_up)
        self.forgotten: frozenset[str] = frozenset()
        self.saved_s = self.retained_s = time.monotonic()
        self._restore()
        self.saved_cursor = dict(self.reader.cursor)

    def _restore(self) -> None:
        state = self.saves.restore(self.track.learner, target_revision=self.target.revision)
        if state is not None:
            self.reader.cursor, self.monitor = dict(state.cursor), state.monitor
            self.counters.take_over(state.counters)
            self.open = OpenRequests(state.open, orphans=state.counters.orphans)
            self.revisions = state.revisions
        self.track.begin(state.track if state else None)
        if state is not None:
            if state.target_revision != self.target.revision:
                self.track.num_unscored = len(self.track.window)
            self.status.event(
                f"goes on after update {self.counters.updates}, version {self.track.live.version} "
                "is live"
            )
        decisions = self.root / versions.DECISIONS
        if not decisions.exists():
            gate = self.config.gate
            needed = max(
                gate.every * self.config.learn.fresh / (1 - gate.held_out),
                gate.requests / gate.held_out,
            )
            self.status.event(
                f"the first decision, in {decisions}, comes at update {gate.every} with "
                f"{gate.requests} requests held out, which takes about {math.ceil(needed)} of them"
            )

    def loop(self, stop: threading.Event) -> None:
        active_s = looked_s = time.monotonic()
        while not stop.is_set() and not self.is_done(looked_s - active_s) and not self.is_outdated:
            # What comes while a cycle runs is for the next one to find.
            looked_s = time.monotonic()
            if self.guarded(self.cycle):
                active_s = time.monotonic()
            else:
                stop.wait(self.config.poll_s)
        is_over = self.config.until_idle_s is not None and not self.is_outdated
        while is_over and not stop.is_set() and not self.guarded(self.finish):
            stop.wait(self.config.poll_s)
        self.guarded(self.save)
        self.show()
        self.status.event(
            f"stopped after update {self.counters.updates}, version {self.track.live.version} is "
            "live"
        )

    def predict(self, left: str, before: float | None) -> None:
        """Prints and logs what the live draft is accepted with under these weights, by text that is
        there already. `before`: under the revision `left`."""
        with self.throttle.work():
            now = self.track.predict()
        known = ", ".join(
            f"{value:.3f} {when}"
            for value, when in ((before, "before"), (now, "now"))
            if value is not None
        )
        texts = len(self.track.window)
        reason = (
            f"alpha of version {self.track.live.version} on {texts} held-out texts: {known}"
            if known
            else "no held-out text to predict its alpha with"
        )
        numbers: dict[str, Any] = {"target_revision": self.target.revision, "left": left}
        numbers |= {"alpha_before": before, "alpha_predicted": now}
        self.track.log.add({"decision": "target", "reason": reason, **numbers})
        self.status.event(f"target revision {self.target.revision} replaces {left}: {reason}")
        self.show()

    def finish(self) -> bool:
        """Ends the work after the last traffic. Returns False while a decision waits to be
        logged."""
        self.sort_in_finished(idle_s=0.0)
        self.track.finish()
        self.show()
        return not self.track.log.waiting

    def is_done(self, idle_s: float) -> bool:
        """`idle_s`: from the last work to the last look."""
        if self.source.is_new:
            return False
        until_s = self.config.until_idle_s
        if not self.track.context.has_updates_left:
            return True
        return until_s is not None and idle_s > until_s

    def guarded(self, work: Callable[[], object]) -> bool:
        """Runs `work`; a full disk or an unreachable buffer is reported and waited out."""
        try:
            return bool(work())
        except OSError as error:
            self.status.event(f"{error}; trying again")
            return False

    def cycle(self) -> bool:
        """Returns True when there was something to do. While rest is owed for earlier work, nothing
        is trained or decided. New weights are looked for after the work, so that some is done under
        each, however often they come."""
        self.track.lifecycle.follow()
        arrived = not self.has_backlog and self.take_in()
        is_rested = self.throttle.pay()
        has_update = is_rested and self.track.work()
        if has_update and time.monotonic() - self.saved_s >= self.config.save_s:
            self.save()
        self.retain()
        self.show()
        self.is_outdated = is_rested and self.source.has_settled()
        return arrived or has_update or not is_rested or self.is_outdated

    @property
    def has_backlog(self) -> bool:
        """True while texts wait for an update of their own (`learn.most_fresh`)."""
        return self.track.uses_each and self.track.is_update_due

    def look_up(self) -> None:
        """Follows choices from outside, marks progress and shows the status between the steps of an
        update that rests for long."""
        self.track.lifecycle.follow()
        self.reader.mark()
        self.show()

    def forget(self, answers: frozenset[str]) -> None:
        """Drops answers that were deleted from the buffer, from memory and from the saved state."""
        if answers == self.forgotten:
            return
        self.open.forget(answers)
        self.states.forget()
        self.track.forget(answers)
        self.save()
        self.forgotten = answers
        self.status.event(f"{len(answers)} answers are forgotten")

    def take_in(self) -> bool:
        cursor = dict(self.reader.cursor)
        # Where each text is used, a shard at a time: held-out texts are not of a later time than
        # the candidate, in a recorded buffer too.
        is_bounded = self.config.learn.most_fresh is not None
        reading = self.reader.read(max_records=1 if is_bounded else MAX_RECORDS)
        if self.source.is_new and not all(self.is_known(one) for one in reading.records):
            # Perhaps of the weights that are about to be read: they are looked at under those.
            self.reader.cursor = cursor
            return False
        self.counters.records += len(reading.records)
        self.counters.damaged_shards += reading.damaged
        self.counters.seeded += reading.seeded
        own = [
            record
            if record.target_revision == self.target.revision
            else replace(record, target_revision=self.target.revision)
            for record in reading.records
            if self.is_own(record)
        ]
        earlier = [
            of_earlier_weights(record, weight_version=self.source.weight_version)
            for record in reading.records
            if not self.is_own(record) and self.is_known(record)
        ]
        self.counters.earlier += len(earlier)
        # First of all: the reader goes on behind them, whatever happens here.
        self.open.add([*own, *earlier])
        for alarm in self.monitor.look(reading.records):
            self.status.event(f"ALARM: {alarm}")
        self.forget(reading.forgotten)
        foreign = [one.target_revision for one in reading.records if not self.is_known(one)]
        if foreign and not self.counters.foreign:
            self.status.event(
                f"records of target revision {foreign[0]} are left out, as {self.target.name!r} is "
                f"{self.target.revision} and was never that here; if it was trained from that, "
                "stop, and run distill on that model first, with the same --versions"
            )
        self.counters.foreign += len(foreign)
        # What is still to be read may be of any request.
        self.sort_in_finished(idle_s=math.inf if reading.more else SILENCE_S)
        return bool(reading.records)

    def is_own(self, record: RoundRecord) -> bool:
        """True for records of the weights at hand."""
        return self.is_known(record) and is_of_weights(
            record, revision=self.target.revision, weight_version=self.source.weight_version
        )

    def is_known(self, record: RoundRecord) -> bool:
        """True for records of the target under any weights that it had here."""
        return record.target_revision in ("", self.target.revision, *self.revisions)

    def sort_in_finished(self, *, idle_s: float) -> None:
        for text in self.open.take(idle_s=idle_s):
            self.sort_in(text)
        self.counters.orphans = self.open.orphans

    def sort_in(self, text: ServedText) -> None:
        gate = self.config.gate
        if self.has_taps(text):
            self.counters.held_out += is_held_out(text, gate.held_out, gate.held_out_by)
        self.track.take(text)

    def has_taps(self, text: ServedText) -> bool:
        """False, and counted, where a text lacks the states that the draft reads; the first one is
        reported."""
        teacher = self.track.learner.teacher
        if teacher.reads(text.records):
            return True
        if self.counters.untapped == 0:
            self.status.event(
                f"records without the target's states of layers {numbers(teacher.taps)} are left "
                "out, since the draft reads these; serve with --record-taps 1024, or give "
                "learn.teacher=live"
            )
        self.counters.untapped += 1
        return False

    def save(self) -> None:
        state = LearnerState(
            target_revision=self.target.revision,
            revisions=self.revisions,
            cursor=self.reader.cursor,
            counters=self.counters,
            monitor=self.monitor,
            track=self.track.state,
            open=self.open.all_records(),
        )
        with_records = not self.reader.folder.is_memory
        self.saves.save(self.track.learner, state, with_records=with_records)
        self.saved_cursor, self.saved_s = dict(self.reader.cursor), time.monotonic()

    def retain(self) -> None:
        """Deletes old shards. Only records that a restart would not read again count as read."""
        if time.monotonic() - self.retained_s < RETENTION_S:
            return
        limits = self.config.retention
        retain(
            self.reader.folder, self.saved_cursor, max_bytes=limits.bytes, max_age_s=limits.age_s
        )
        self.reader.forget_gone_writers()
        self.retained_s = time.monotonic()

    def show(self) -> None:
        line = (
            f"update {self.counters.updates}, {self.counters.texts} texts, {self.track.describe()}"
        )
        if self.throttle.budget < 1:
            line += f", learning {self.throttle.budget:.0%} of the time"
        values = {
            **asdict(self.counters),
            **self.track.to_dict(),
            "lossless_alarms": len(self.monitor.alarms),
            "losslessness": self.monitor.numbers(),
            "worked_s": self.throttle.worked_s,
            "rested_s": self.throttle.rested_s,
        }
        self.status.show(line, values)
