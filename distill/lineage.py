"""One versions folder and what is learned towards its next version: train, decide, watch, roll
back. It reads nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.config import to_dict
from draftsmith.distill.buffer.traffic import ServedText, depth_of, is_held_out, remembered
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.gate.canary import CanaryDesk
from draftsmith.distill.gate.drift import Drift
from draftsmith.distill.gate.gate import Decision, decide
from draftsmith.distill.gate.quarantine import enough, notice, regate
from draftsmith.distill.gate.regression import LiveWatch, Watched
from draftsmith.distill.gate.scoring import Scorer
from draftsmith.distill.gate.sequential import Ledger
from draftsmith.distill.learn import learner as learning
from draftsmith.distill.learn.learner import Learner, UpdateReport
from draftsmith.distill.learn.optimizer import NewOptimizer
from draftsmith.distill.publisher import Publisher
from draftsmith.distill.state import Counters, Kept, LineageState
from draftsmith.distill.status import DecisionLog, describe
from draftsmith.distill.throttle import Throttle
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.published import versions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.version import __version__


@dataclass(frozen=True)
class Site:
    """What the lineages of a daemon have in common."""

    config: DistillConfig
    target: Target
    optimizer: NewOptimizer
    throttle: Throttle
    counters: Counters
    tell: Callable[[str], None]  # a line for people
    save: Callable[[], None]  # the whole daemon's state
    cursor: Callable[[], Mapping[str, int]]  # how far the buffer is read


class Lineage:
    """`name` is the class of requests that its versions draft for. "" is for all, and the only one
    with versions on trial."""

    def __init__(self, root: str | Path, site: Site, *, draft: str, name: str = ""):
        self.root, self.site, self.name = Path(root), site, name
        self.config, self.counters = site.config, site.counters
        self.publisher = Publisher(self.root, draft, site.target)
        self.log = DecisionLog(self.root, self.tell)
        self.canary = CanaryDesk(self.publisher, self.config.gate)
        candidate = self.publisher.load(versions.folder_of(self.root, self.publisher.version))
        self.learner = Learner(
            candidate,
            site.target,
            self.config.learn,
            seed=self.config.seed,
            optimizer=site.optimizer,
        )
        self.fresh: list[ServedText] = []
        self.window: list[ServedText] = []
        self.ledger, self.drift = Ledger(), Drift(self.config.drift)
        # stays set while held-out requests are too few, or a full disk prevents a publication
        self.is_gate_due = False
        self.num_unjudged = 0  # held-out texts since the last look at a version in quarantine
        self.report: UpdateReport | None = None
        self.live = self._live_scorer()
        self.watch = LiveWatch(self.publisher, self.config.gate, self.live)

    def _live_scorer(self) -> Scorer:
        return Scorer(self.publisher.live, self.site.target, max_length=self.length)

    @property
    def kept(self) -> Kept:
        version, trial, drift = self.publisher.version, self.canary.trial, self.drift.kept()
        return Kept(
            self.learner,
            LineageState(
                version, self.is_gate_due, self.ledger, trial, drift, self.fresh, self.window
            ),
        )

    def begin(self, state: LineageState | None) -> None:
        """Where the last run ended, whose learner is filled already; or at the live version."""
        if state is not None:
            self.is_gate_due, self.ledger = state.is_gate_due, state.ledger
            self.fresh, self.window, self.canary.trial = state.fresh, state.window, state.trial
            self.drift.restore(state.drift)
        if state is not None and state.live_version != self.publisher.version:
            self._new_live_version()
        else:
            self._notice_target()

    def tell(self, text: str) -> None:
        self.site.tell(f"class {self.name!r}: {text}" if self.name else text)

    @property
    def served_as(self) -> str:
        """How records name the live version."""
        return self.record_name(self.publisher.version)

    def record_name(self, version: int) -> str:
        return f"{self.name}/{version}" if self.name else str(version)

    # Traffic.

    def take(self, text: ServedText) -> None:
        self.look_for_drift(text)
        self.canary.observe(text, self.served_as)
        self.watch.take(text, self.served_as)
        if not is_held_out(text, self.config.gate.held_out):
            # More than the reservoir holds would only be waited for: the newest traffic matters
            # most.
            self.fresh = [*self.fresh, text.slim()][-self.config.learn.reservoir :]
        elif text.is_scorable:
            self.window = [*self.window, text][-self.config.gate.window :]
            self.num_unjudged += 1

    def look_for_drift(self, text: ServedText) -> None:
        alarm = self.drift.observe(text, self.served_as)
        if alarm is not None:
            self.counters.drift_alarms += 1
            self.log.add({"decision": "drift", "reason": alarm.describe(), **asdict(alarm)})
            self.tell(f"drift: {alarm.describe()}")

    def forget(self, answers: frozenset[str]) -> None:
        self.fresh, self.window = remembered(self.fresh, answers), remembered(self.window, answers)
        self.live.forget(answers)
        self.watch.forget(answers)
        self.learner.reservoir.forget(answers)

    # Turns.

    def follow(self) -> None:
        """Somebody else may have chosen another version: what servers run is what
        `current` says."""
        self.log.flush()
        if self._chosen() != self.publisher.version:
            left = self.publisher.version
            self.publisher.reload()
            self.tell(
                f"version {self.publisher.version} was chosen instead of {left}; learning goes on "
                "from it"
            )
            self._new_live_version()
            self.start_over()
        elif self.canary.follow():
            on_trial = f"version {self.canary.version}" if self.canary.trial else "no version"
            self.tell(f"{on_trial} is on trial now, as its file says")
            if self.canary.trial is None:
                self.start_over()

    def _chosen(self) -> int | None:
        """What cannot be read, half written by hand perhaps, is no choice yet; servers
        tell of it."""
        try:
            return versions.latest(self.root)
        except UserError:
            return self.publisher.version

    def work(self) -> bool:
        """What is due; True when the candidate took steps."""
        gate = self.config.gate
        has_update = len(self.fresh) >= self.config.learn.fresh and not self.drift.is_resting
        if has_update:
            self.update()
            self.is_gate_due |= self.learner.updates % gate.every == 0
        if self.canary.trial is not None:
            with self.site.throttle.work():
                self.judge_canary()
        elif self.is_gate_due and len(self.window) >= gate.requests:
            with self.site.throttle.work():
                self.gate()
        if self.made_for:
            if self.num_unjudged >= gate.requests:
                with self.site.throttle.work():
                    self.regate()
        elif self.watch.is_due:
            with self.site.throttle.work():
                self.look_at_live()
        return has_update

    def finish(self) -> None:
        """The traffic is over: what waited for company is trained on, and the last candidate is
        judged."""
        self.log.flush()
        if self.fresh:
            self.update()
            self.is_gate_due = True
        if self.is_gate_due and self.canary.trial is None:
            self.gate()

    # Learning.

    def update(self) -> None:
        self.report = self.learner.update(self.fresh, self.site.throttle.rest)
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
        return depth_of(self.window)

    @property
    def length(self) -> int:
        return min(self.config.learn.max_length, self.site.target.max_positions)

    # Decisions.

    def gate(self) -> None:
        evidence = self.ledger.gate
        with self.learner.averaged() as candidate:
            decision = decide(
                self.live,
                candidate,
                self.window,
                self.config.gate,
                max_depth=self.depth,
                evidence=evidence,
            )
        if self.made_for:
            decision = enough(decision, self.config.gate)
        if decision.decision == "accept":
            self.publish(decision, self.learner.averaged())
            self.is_gate_due = False
            return
        self.is_gate_due = False
        self.decided(decision)
        if decision.decision == "refuse" or self.has_fallen_behind(decision):
            self.start_over()

    def has_fallen_behind(self, decision: Decision) -> bool:
        """A candidate that is worse with evidence would take long to come back; the live draft is
        the better start."""
        comparison = decision.comparison
        return (
            comparison is not None
            and comparison.gain < 0
            and comparison.p_value <= self.config.gate.error
        )

    def publish(
        self, decision: Decision, candidate: AbstractContextManager[TrainedDrafter]
    ) -> None:
        self.site.save()
        training = {
            "version": __version__,
            "online": to_dict(self.config.learn),
            "updates": self.learner.updates,
        }
        records, texts = self.counters.records, self.counters.texts
        live = self.publisher.version
        # Servers have one version on trial at a time; a live version in quarantine leaves nothing
        # to compare with.
        share = 0.0 if self.name or self.made_for else self.config.gate.canary
        data_range = {"records": records, "texts": texts, "cursor": self.site.cursor()}
        try:
            with candidate as drafter:
                version = self.publisher.publish(
                    drafter,
                    training=training,
                    data_range=data_range,
                    gate=decision.to_dict(),
                    live=share == 0,
                )
        except UserError as error:
            self.decided(
                replace(
                    decision,
                    decision="refuse",
                    reason=f"the written candidate cannot be read back: {error}",
                )
            )
            self.start_over()
            return
        self.decided(decision, version=version, live=live, share=share)
        if share > 0:
            self.canary.begin(version)
        else:
            self._new_live_version()
        self.site.save()
        self.prune()

    def prune(self) -> None:
        needed = (
            self.publisher.parent_version,
            self.canary.version,
            next(self.publisher.own_versions(), None),
        )
        versions.prune(self.root, keep=self.config.retention.versions, needed=needed)

    def rebase(self, drafter: TrainedDrafter, version: int) -> None:
        """The draft that all classes share is the live one here as well; the candidate stays, and
        is held to it."""
        reason = f"version {version} of the draft that all classes share"
        self.publisher.publish(
            drafter, training={}, data_range={"copy_of": version}, gate={"reason": reason}
        )
        self._new_live_version()
        self.prune()

    def _new_live_version(self) -> None:
        """Error budgets and the watch count from here; a version on trial was compared with another
        one."""
        self.canary.end()
        self.live = self._live_scorer()
        self.watch.begin(self.live)
        self.learner.live_changed(self.publisher.live.state_dict())
        self._notice_target()
        self.ledger = Ledger()
        self.drift.new_version()

    def decided(
        self,
        decision: Decision,
        *,
        version: int | None = None,
        live: int | None = None,
        share: float = 0.0,
    ) -> None:
        """Every decision with its numbers: a line for people, a line in decisions.jsonl."""
        numbers = {
            **decision.to_dict(),
            "live": live or self.publisher.version,
            "version": version,
            "share": share,
        }
        self.log.add({**numbers, "updates": self.learner.updates})
        self.counters.count(decision.decision)
        self.tell(describe(decision, version, share))
        if self.drift.judged(promoted=version is not None):
            self.tell(
                f"{self.drift.fruitless} decisions without a promotion; learning rests until the "
                "traffic changes"
            )

    def look_at_live(self) -> None:
        watched = self.watch.look(self.ledger, self.served_as)
        if watched.version is not None:
            self.roll_back(watched, watched.version)

    def roll_back(self, watched: Watched, version: int) -> None:
        left = self.publisher.version
        if not self.publisher.roll_back(version):
            self.tell(
                f"version {left} is worse than {version} ({watched.reason}), which cannot be "
                "returned to any more"
            )
            self.watch.begin(self.live)
            return
        self.rolled_back(left, watched.to_dict())
        self._new_live_version()
        self.start_over()
        self.site.save()

    def rolled_back(self, left: int, numbers: Mapping[str, Any]) -> None:
        version = self.publisher.version
        self.counters.rolled_back += 1
        self.log.add({"decision": "rolled back", "left": left, "version": version, **numbers})
        self.tell(f"version {left} is rolled back to {version}: {numbers['reason']}")

    # A version on trial.

    def judge_canary(self) -> None:
        if self.canary.notices_silence():
            self.tell(
                f"version {self.canary.version} is on trial and servers draft for nobody; the "
                "trial waits until they do"
            )
        verdict = self.canary.judge(self.live, self.window, max_depth=self.depth)
        if verdict is None or self.canary.trial is None:
            return
        tried, numbers = (
            self.canary.trial.version,
            {"reason": verdict.reason, **self.canary.trial.numbers()},
        )
        if verdict.decision == "promoted":
            self.promote(tried, numbers)
        else:
            self.rolled_back(tried, numbers)
            self.canary.end()
            self.start_over()
        self.site.save()

    def promote(self, version: int, numbers: Mapping[str, Any]) -> None:
        left = self.publisher.version
        self.publisher.promote(version)
        self.log.add({"decision": "promoted", "version": version, "live": left, **numbers})
        self.tell(f"version {version} is promoted after its trial: {numbers['reason']}")
        self._new_live_version()

    # Another target.

    def _notice_target(self) -> None:
        """`made_for` is the revision of the target that the live version was made for, where that
        is another one."""
        self.made_for = notice(
            self.root, self.publisher.version, self.site.target.revision, self.tell
        )

    def regate(self) -> None:
        """The same draft as a version for this target, if its traffic shows it good enough."""
        self.num_unjudged = 0
        decision = regate(self.live, self.window, self.config.gate, max_depth=self.depth)
        if decision.decision == "accept":
            self.publish(decision, nullcontext(self.publisher.live))
        else:
            self.decided(decision)

    # Showing.

    def describe(self) -> str:
        told = (
            f", loss {self.report.loss:.3f}, alpha {self.report.alpha[0]:.3f}"
            if self.report
            else ""
        )
        return (
            f"version {self.publisher.version}, {len(self.window)} held out, waiting "
            f"{len(self.fresh)}{told}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.publisher.version,
            "is_gate_due": self.is_gate_due,
            "fresh": len(self.fresh),
            "window": len(self.window),
            "reservoir": len(self.learner.reservoir.texts),
            "loss": self.report.loss if self.report else None,
            "alpha_training": self.report.alpha if self.report else [],
            "canary": {"version": self.canary.version, **self.canary.trial.numbers()}
            if self.canary.trial
            else None,
            "live": self.watch.latest.to_dict() if self.watch.latest else None,
            "drift": self.drift.to_dict(),
            "resting": self.drift.is_resting,
            "quarantined": bool(self.made_for),
        }
