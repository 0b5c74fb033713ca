"""One draft and the candidate for its next version: train on served text, decide on held-out text.

It reads no buffer itself. Changes of the live version are in `version_lifecycle.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from draftsmith.distill.buffer.traffic import (
    ServedText,
    depth_of,
    is_held_out,
    newest_within,
    samplers_of,
    without,
)
from draftsmith.distill.gate.gate import (
    Comparison,
    Decision,
    alphas_of,
    compare,
    decide,
    enough,
    pairs_of,
    regate,
)
from draftsmith.distill.learn import learner as learning
from draftsmith.distill.learn.learner import Learner, UpdateReport, taps_share
from draftsmith.distill.publisher import Publisher
from draftsmith.distill.state import LearnerContext, TrackState
from draftsmith.distill.version_lifecycle import DecisionLog, LiveVersion, VersionLifecycle
from draftsmith.drafters import versions


class DraftTrack:
    """Learner, training texts and held-out window of the draft."""

    def __init__(self, context: LearnerContext):
        self.context, self.config = context, context.config
        self.log = DecisionLog(context)
        publisher = Publisher(self.config.versions, self.config.draft, context.target)
        self.live = LiveVersion(publisher, context, self.log)
        folder = versions.folder_of(publisher.root, publisher.version)
        self.learner = Learner(
            publisher.load(folder),
            context.target,
            self.config.learn,
            seed=self.config.seed,
            states=context.states,
        )
        self.lifecycle = VersionLifecycle(self.live, self.learner, context)
        self.fresh: list[ServedText] = []
        self.window: list[ServedText] = []
        # stays set while held-out requests are too few, or a full disk prevents a publication
        self.is_gate_due = False
        self.num_unscored = 0  # held-out texts since the last look at a version in quarantine
        self.latest_update: UpdateReport | None = None
        # alpha of the live draft when the target's weights were read
        self.predicted: float | None = None

    @property
    def state(self) -> TrackState:
        displaced, kept = self.live.watch.displaced, self.learner.reservoir
        return TrackState(
            live_version=self.live.version,
            is_gate_due=self.is_gate_due,
            ledger=self.live.ledger,
            drift=self.live.drift.kept(),
            steps=self.learner.steps,
            updates=self.learner.updates,
            reservoir_seen=kept.seen,
            fresh=self.fresh,
            window=self.window,
            reservoir=kept.texts,
            latest=kept.latest,
            displaced=displaced.version if displaced else None,
            spared=self.lifecycle.spared,
        )

    def begin(self, state: TrackState | None) -> None:
        """Goes on from a saved state, whose learner is filled already, or begins at the live
        version."""
        if state is not None:
            self.is_gate_due, self.fresh, self.window = (
                state.is_gate_due,
                state.fresh,
                state.window,
            )
            if state.live_version != self.live.version:
                # Ended between a rollback and its save, perhaps: the held-out texts are of traffic
                # that the candidate is not to be judged on, as in `check_live`.
                self.window = []
        self.lifecycle.begin(state)

    def predict(self) -> float | None:
        """alpha of the live draft under the target at hand, on the held-out texts; None without
        any. The learner's own look: no traffic under this target is needed."""
        alphas = alphas_of(self.live.scorer, self.window, max_depth=self.depth)
        self.predicted = float(np.concatenate(alphas).mean()) if alphas else None
        return self.predicted

    @property
    def depth(self) -> int:
        return depth_of(self.window)

    def take(self, text: ServedText) -> None:
        """Sorts a finished text into training or held-out texts. One of weights that the target had
        before is a text, and no evidence of how a draft is accepted now."""
        served_as, gate = str(self.live.version), self.config.gate
        if text.is_of(self.context.target.revision):
            self.live.look_for_drift(text)
            self.live.watch.take(text, served_as)
        if not self.learner.teacher.reads(text.records):
            return
        held = taps_share(self.config.learn)
        if not is_held_out(text, gate.held_out, gate.held_out_by):
            fresh = self._slimmed([*self.fresh, text])
            if not self.uses_each:
                # More than the reservoir holds would only be waited for: the newest traffic
                # matters most.
                fresh = fresh[-self.config.learn.reservoir :]
            self.fresh = newest_within(fresh, held)
        elif text.is_scorable:
            self.window = newest_within([*self.window, text][-gate.window :], held)
            self.num_unscored += 1

    def _slimmed(self, fresh: list[ServedText]) -> list[ServedText]:
        """Keeps what the gate reads of the newest texts alone, which may be scored."""
        edge = len(fresh) - 1 - (self.config.gate.window if self.config.gate.fresh else 0)
        if edge >= 0:
            fresh[edge] = self.learner.reservoir.slim(fresh[edge])
        return fresh

    def forget(self, answers: frozenset[str]) -> None:
        self.fresh, self.window = without(self.fresh, answers), without(self.window, answers)
        self.live.forget(answers)
        self.learner.reservoir.forget(answers)

    @property
    def is_update_due(self) -> bool:
        is_enough = len(self.fresh) >= self.config.learn.fresh and self.context.has_updates_left
        return is_enough and not self.live.drift.is_resting

    @property
    def uses_each(self) -> bool:
        """True where each training text gets its update, and reading waits for it."""
        return self.config.learn.most_fresh is not None and not self.live.drift.is_resting

    def work(self) -> bool:
        """Does all work that is due; True when the candidate took steps."""
        gate = self.config.gate
        if self.live.made_for:
            if self.num_unscored >= gate.requests:
                with self.context.throttle.work():
                    self.regate()
            self.live.withhold()
        has_update = self.is_update_due
        if has_update:
            self.update()
            self.is_gate_due |= self.learner.updates % gate.every == 0
        if self.is_gate_due and len(self.window) >= gate.requests:
            with self.context.throttle.work():
                self.gate()
        if self.live.watch.is_due and not self.live.made_for:
            with self.context.throttle.work():
                self.check_live()
        return has_update

    def check_live(self) -> None:
        if not self.lifecycle.check_live():
            return
        if self.live.watch.displaced is not None:
            # Held-out texts of other traffic would show the candidate better than it is on the
            # newest.
            self.window = []
        self.context.save()

    def finish(self) -> None:
        """Trains on the texts that are left, within `max_updates`, and decides on the last
        candidate."""
        self.log.flush()
        while self.fresh and self.context.has_updates_left:
            self.update()
            self.is_gate_due = True
        if self.is_gate_due:
            self.gate()

    def update(self) -> None:
        was_masked = self.is_masked
        taken = self.fresh[: self.config.learn.most_fresh]
        self.weigh_fresh(taken)
        self.latest_update = self.learner.update(taken, self.context.throttle.rest)
        self.context.counters.texts += len(taken)
        self.context.counters.updates += 1
        self.context.counters.positions_trained += self.latest_update.tokens
        self.context.counters.positions_masked += self.latest_update.masked
        self.fresh = self.fresh[len(taken) :]
        if self.is_masked and not was_masked:
            self.context.report(
                "nothing was learned from the latest texts, whose records hold no distributions; "
                "serve without --no-learn-distributions, or give learn.teacher=live"
            )
        if self.latest_update.broken >= learning.MAX_BROKEN_STEPS:
            reason = "training gave gradients that are not finite"
            self.lifecycle.record(Decision("refuse", reason))
            self.lifecycle.start_over()

    def weigh_fresh(self, fresh: Sequence[ServedText]) -> None:
        """Adds evidence by texts that the candidate is about to be trained on. One without a step
        is the live draft."""
        gate, revision = self.config.gate, self.context.target.revision
        known = [text for text in fresh if text.is_scorable and text.is_of(revision)]
        texts = known[-gate.window :]
        if self.live.made_for or not (gate.fresh and texts and self.learner.steps):
            return
        live = self.live.scorer
        with self.context.throttle.work(), self.learner.averaged() as candidate:
            pairs = pairs_of(live, live.of(candidate), texts, max_depth=depth_of(texts))
        self.live.ledger.gate.add_fresh(pairs.differences)

    @property
    def is_masked(self) -> bool:
        """True where the latest update trained nothing, since no distribution is recorded."""
        update = self.latest_update
        return update is not None and update.tokens == 0 and update.masked > 0

    def gate(self) -> None:
        """Publishes the candidate, keeps it in training, or drops it."""
        with self.learner.averaged() as candidate:
            decision = decide(
                self.live.scorer,
                candidate,
                self.window,
                self.config.gate,
                max_depth=self.depth,
                evidence=self.live.ledger.gate,
            )
        if self.live.made_for:
            decision = enough(decision, self.config.gate)
        if decision.decision == "accept":
            self._publish(decision)
            self.is_gate_due = False
            return
        self.is_gate_due = False
        self.lifecycle.record(decision)
        if decision.decision == "refuse" or self._has_fallen_behind(decision):
            self.lifecycle.start_over()
        self.lifecycle.spared = max(0, self.lifecycle.spared - 1)

    def _publish(self, decision: Decision) -> None:
        """Publishes the candidate, whose scores are then those of the live version."""
        left = self.live.version
        self.lifecycle.publish(decision, self.learner.averaged())
        if self.live.version != left and decision.judged is not None:
            self.live.scorer.take_over(decision.judged)

    def _has_fallen_behind(self, decision: Decision) -> bool:
        """True for a candidate that is worse with evidence: the live draft is the better start.
        One that went on past a rollback has to be worse than the version that was left, too, for
        some decisions."""
        comparison, displaced = decision.comparison, self.live.watch.displaced
        if comparison is None or not self._is_worse(comparison):
            return False
        if not self.lifecycle.spared or displaced is None or decision.judged is None:
            return True
        pairs = pairs_of(displaced.scorer, decision.judged, self.window, max_depth=self.depth)
        return self._is_worse(compare(*pairs.alphas))

    def _is_worse(self, comparison: Comparison) -> bool:
        return comparison.gain < 0 and comparison.p_value <= self.config.gate.error

    def regate(self) -> None:
        """Publishes the live draft again for a new target, if texts show it good enough."""
        self.num_unscored = 0
        decision = regate(self.live.scorer, self.window, self.config.gate, max_depth=self.depth)
        if decision.decision == "accept":
            self.lifecycle.publish(decision, nullcontext(self.live.draft))
        else:
            self.lifecycle.record(decision)

    def describe(self) -> str:
        update = self.latest_update
        training = ", loss none yet" if update else ""
        if update and update.loss is not None:
            training = f", loss {update.loss:.3f}, alpha {update.alpha[0]:.3f}"
        return f"version {self.live.version}, {self._awaited()}{training}"

    def _awaited(self) -> str:
        """Words on what the next decision takes, and what of it is there."""
        gate, learn, learner = self.config.gate, self.config.learn, self.learner
        if self.live.drift.is_resting:
            return "resting until the traffic changes"
        step = f", at step {learner.at_step} of {learn.steps} now" if learner.at_step else ""
        if self.is_gate_due and len(self.window) >= gate.requests:
            return (
                f"deciding next on update {learner.updates}, on {len(self.window)} requests{step}"
            )
        missing = 0 if self.is_gate_due else gate.every - learner.updates % gate.every
        return (
            f"next decision at update {learner.updates + missing} with {gate.requests} requests "
            f"held out (now {len(self.window)}), {len(self.fresh)} new texts "
            f"(an update takes {learn.fresh}){step}"
        )

    def to_dict(self) -> dict[str, Any]:
        update = self.latest_update
        watched = self.live.watch.latest
        return {
            "version": self.live.version,
            "is_gate_due": self.is_gate_due,
            "fresh": len(self.fresh),
            "window": len(self.window),
            "samplers": samplers_of(self.window),
            "reservoir": len(self.learner.reservoir.texts),
            "loss": update.loss if update else None,
            "alpha_training": update.alpha if update else [],
            "teacher": self.config.learn.teacher,
            "live": watched.to_dict() if watched else None,
            "drift": self.live.drift.to_dict(),
            "resting": self.live.drift.is_resting,
            "quarantined": self.live.is_withheld,
            "alpha_predicted": self.predicted,
            "target_revision": self.context.target.revision,
        }
