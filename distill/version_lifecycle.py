"""Changes of the live version of a draft track: publish, roll back, prune."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.gate.drift import Alarm, Drift
from draftsmith.distill.gate.gate import Decision
from draftsmith.distill.gate.regression import LiveWatch, Watched
from draftsmith.distill.gate.scoring import Scorer
from draftsmith.distill.gate.sequential import Ledger
from draftsmith.distill.learn.learner import Learner
from draftsmith.distill.publisher import Publisher
from draftsmith.distill.state import LearnerContext, TrackState
from draftsmith.drafters import versions
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.errors import UserError
from draftsmith.version import __version__

# Gate decisions for which a candidate that went on past a rollback may be worse than the live
# version: replay and new texts take some updates to teach it what that one holds. After so many
# without catching up it is taken for one that does not.
SPARED_DECISIONS = 16
HINT_EVERY = 8  # decisions without a promotion


class VersionLifecycle:
    """Publishes the learner's candidate and follows whatever becomes live.

    The candidate of `learner` restarts from the live draft where it has lost its worth.
    """

    def __init__(self, live: LiveVersion, learner: Learner, context: LearnerContext):
        self.live, self.learner, self.context = live, learner, context
        self.publisher, self.log = live.publisher, live.log
        # Gate decisions left for which the candidate that went on past a rollback is spared.
        self.spared = 0

    def begin(self, state: TrackState | None) -> None:
        """Goes on from a saved state, or begins at the live version."""
        if state is not None:
            self.live.ledger = state.ledger
            if state.drift:
                self.live.drift.restore(state.drift)
        if state is not None and state.live_version != self.live.version:
            self.live.renew()
            return
        self.live.notice_target()
        if state is not None and state.displaced is not None:
            self.spared = state.spared
            self._displace_again(state.displaced)

    def _displace_again(self, version: int) -> None:
        """Reads a displaced version after a restart, where it is still whole."""
        known, draft = self.publisher.open_first([version])
        if known is not None and draft is not None:
            self.live.watch.displace(known, self.live.scorer.of(draft))

    def follow(self) -> None:
        """Adopts a version that was chosen outside this process, by `current`."""
        self.log.flush()
        if self._chosen() != self.live.version:
            left = self.live.version
            self.publisher.reload()
            self.context.report(
                f"version {self.live.version} was chosen instead of {left}; learning goes on "
                "from it"
            )
            self.live.renew()
            self.start_over()

    def _chosen(self) -> int | None:
        """Version that `current` names. An unreadable file, half written by hand perhaps, changes
        nothing; servers report it."""
        try:
            return versions.latest(self.publisher.root)
        except UserError:
            return self.live.version

    def start_over(self) -> None:
        """Makes the candidate a copy of the live draft."""
        self.learner.restart(self.live.draft.state_dict())
        self.live.ledger.gate.new_candidate()
        self.spared = 0

    def record(
        self, decision: Decision, *, version: int | None = None, live: int | None = None
    ) -> None:
        """Logs a gate decision and counts it towards the rest of learning."""
        self.log.gated(
            decision, live=live or self.live.version, version=version, updates=self.learner.updates
        )
        drift = self.live.drift
        if drift.count_decision(promoted=version is not None):
            self.context.report(
                f"{drift.fruitless} decisions without a promotion; learning rests until the "
                "traffic changes"
            )
        elif drift.fruitless and drift.fruitless % HINT_EVERY == 0:
            self.context.report(
                f"{drift.fruitless} decisions in a row without a promotion; a lower learn.lr may "
                "help"
            )

    def publish(
        self, decision: Decision, candidate: AbstractContextManager[TrainedDrafter]
    ) -> None:
        self.context.save()
        live = self.live.version
        try:
            version = self._write(decision, candidate)
        except UserError as error:
            reason = f"the written candidate cannot be read back: {error}"
            self.record(replace(decision, decision="refuse", reason=reason))
            self.start_over()
            return
        self.record(decision, version=version, live=live)
        self.spared = 0
        self.live.renew()
        self.context.save()
        self.prune()

    def _write(self, decision: Decision, candidate: AbstractContextManager[TrainedDrafter]) -> int:
        """Number of the new version, with its provenance in the manifest."""
        counters = self.context.counters
        training = {
            "version": __version__,
            "online": asdict(self.context.config.learn),
            "updates": self.learner.updates,
        }
        data_range = {
            "records": counters.records,
            "texts": counters.texts,
            "cursor": self.context.cursor(),
        }
        with candidate as drafter:
            return self.publisher.publish(
                drafter, training=training, data_range=data_range, gate=decision.to_dict()
            )

    def prune(self) -> None:
        needed = (
            self.publisher.parent_version,
            displaced.version if (displaced := self.live.watch.displaced) else None,
            next(self.publisher.own_versions(), None),
        )
        keep = self.context.config.retention.versions
        versions.prune(self.publisher.root, keep=keep, needed=needed)

    def check_live(self) -> bool:
        """Rolls the live version back if its traffic shows it worse than another one. True where
        it did; the state is then to be saved."""
        watched = self.live.look()
        return watched.version is not None and self._roll_back(watched, watched.version)

    def _roll_back(self, watched: Watched, version: int) -> bool:
        left, scorer = self.live.version, self.live.scorer
        # Traffic has changed, and what the candidate has learned may be needed again.
        is_kept = watched.is_outdone and self._is_proven(left, version)
        if not self.publisher.roll_back(version):
            self.context.report(
                f"version {left} is worse than {version} ({watched.reason}), which cannot be "
                "returned to any more"
            )
            self.live.watch.begin(self.live.scorer)
            return False
        self.log.rolled_back(left, self.live.version, watched.to_dict())
        self.live.renew()
        if is_kept:
            self.live.watch.displace(left, scorer)
            self.spared = SPARED_DECISIONS
        else:
            self.start_over()
        return True

    def _is_proven(self, left: int, version: int) -> bool:
        """True where a gate has once accepted the version that is left for `version`, or `version`
        was displaced by it. One that was chosen by hand may never have been good."""
        displaced = self.live.watch.displaced
        if displaced is not None and displaced.version == version:
            return True
        try:
            manifest = versions.read_manifest(self.publisher.root, left)
        except UserError:
            return False
        return manifest.get("gate", {}).get("decision") == "accept"


class LiveVersion:
    """Everything that counts from the moment at which a version went live.

    `made_for` is the target revision that the version was made for, "" where that is the target at
    hand. Such a version is withheld, unless it is found good enough for this target.
    """

    def __init__(self, publisher: Publisher, context: LearnerContext, log: DecisionLog):
        self.publisher, self.context, self.log = publisher, context, log
        self.made_for, self.is_withheld = "", False
        self.ledger, self.drift = Ledger(), Drift(context.config.drift)
        self.scorer = self._new_scorer()
        self.watch = LiveWatch(publisher, context.config.gate, self.scorer)

    def _new_scorer(self) -> Scorer:
        target = self.context.target
        length = min(self.context.config.learn.max_length, target.max_positions)
        return Scorer(self.draft, target, max_length=length, states=self.context.states)

    @property
    def version(self) -> int:
        return self.publisher.version

    @property
    def draft(self) -> TrainedDrafter:
        return self.publisher.live

    def renew(self) -> None:
        """Starts all counts again, for the version that the publisher has made live."""
        self.scorer = self._new_scorer()
        self.watch.begin(self.scorer)
        self.notice_target()
        self.ledger = Ledger()
        self.drift.new_version()

    def notice_target(self) -> None:
        revision = self.context.target.revision
        self.made_for = versions.stranger(self.publisher.root, self.version, revision)
        self.is_withheld = False

    def withhold(self) -> None:
        """Logs a version in quarantine once."""
        if not self.made_for or self.is_withheld:
            return
        own, self.is_withheld = self.context.target.revision, True
        entry = {"decision": "quarantine", "version": self.version, "target_revision": own}
        logged = versions.read_decisions(self.publisher.root)
        if not any(entry.items() <= one.items() for one in logged):
            reason = f"made for target revision {self.made_for}, this is {own}"
            self.log.add({**entry, "reason": reason})
            self.context.report(f"version {self.version} is in quarantine: {reason}")

    def look_for_drift(self, text: ServedText) -> None:
        alarm = self.drift.observe(text, str(self.version))
        if alarm is not None:
            self.log.drifted(alarm)

    def look(self) -> Watched:
        """Comparison with what the version should be accepted with, and with earlier versions."""
        return self.watch.look(self.ledger, str(self.version))

    def forget(self, answers: frozenset[str]) -> None:
        self.scorer.forget(answers)
        self.watch.forget(answers)


class DecisionLog:
    """Log of decisions. A line that a full disk refuses waits for `flush`: a failed write must not
    separate a decision from its consequences."""

    def __init__(self, context: LearnerContext):
        self.context = context
        self.waiting: list[dict[str, Any]] = []

    def add(self, decision: Mapping[str, Any]) -> None:
        self.waiting.append({"time_s": time.time(), **decision})
        self.flush()

    def flush(self) -> None:
        while self.waiting:
            try:
                versions.record_decision(self.context.config.versions, self.waiting[0])
            except OSError as error:
                self.context.report(f"{error}; {len(self.waiting)} decisions wait to be logged")
                return
            del self.waiting[0]

    def gated(self, decision: Decision, *, live: int, version: int | None, updates: int) -> None:
        """A gate decision with its numbers. `version` is the published one."""
        numbers = {**decision.to_dict(), "live": live, "version": version}
        self.add({**numbers, "updates": updates})
        self.context.counters.count(decision.decision)
        self.context.report(describe(decision, version))

    def rolled_back(self, left: int, version: int, numbers: Mapping[str, Any]) -> None:
        self.context.counters.rolled_back += 1
        self.add({"decision": "rolled back", "left": left, "version": version, **numbers})
        self.context.report(f"version {left} is rolled back to {version}: {numbers['reason']}")

    def drifted(self, alarm: Alarm) -> None:
        self.context.counters.drift_alarms += 1
        self.add({"decision": "drift", "reason": alarm.describe(), **asdict(alarm)})
        self.context.report(f"drift: {alarm.describe()}")


def describe(decision: Decision, version: int | None) -> str:
    """Line for people."""
    comparison = decision.comparison
    text = f"version {version} published" if version else decision.decision
    text += f": {decision.reason}"
    if comparison is not None and comparison.requests:
        text += (
            f" (alpha {comparison.first:.4f} -> {comparison.second:.4f}, gain "
            f"{comparison.gain:+.4f} over {comparison.requests} "
            f"requests{drafted(decision.samplers)}, p <= {decision.p_value:.2g} against "
            f"{decision.level:.2g} at any look)"
        )
    return text


def drafted(samplers: Mapping[str, int]) -> str:
    """Shares of the engines' choices of drafted tokens, where another than the usual one is
    there."""
    total = sum(samplers.values())
    if not set(samplers) - {"probabilistic"}:
        return ""
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in samplers.items())
    return f" (drafts: {shares})"
