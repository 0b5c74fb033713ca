"""The live version of a draft track: its scores, its evidence and the traffic that it serves."""

from __future__ import annotations

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.context import LearnerContext
from draftsmith.distill.decisions import DecisionLog
from draftsmith.distill.gate.drift import Drift
from draftsmith.distill.gate.quarantine import notice
from draftsmith.distill.gate.regression import LiveWatch, Watched
from draftsmith.distill.gate.scoring import Scorer
from draftsmith.distill.gate.sequential import Ledger
from draftsmith.distill.publisher import Publisher
from draftsmith.drafters.interface import TrainedDrafter


class LiveVersion:
    """Everything that counts from the moment at which a version went live.

    `made_for` is the target revision that the version was made for, "" where that is the target at
    hand.
    """

    def __init__(self, publisher: Publisher, context: LearnerContext, log: DecisionLog):
        self.publisher, self.context, self.log = publisher, context, log
        self.made_for = ""
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

    @property
    def served_as(self) -> str:
        """Name of the live version in records."""
        return f"{self.log.name}/{self.version}" if self.log.name else str(self.version)

    def renew(self) -> None:
        """Starts all counts again, for the version that the publisher has made live."""
        self.scorer = self._new_scorer()
        self.watch.begin(self.scorer)
        self.notice_target()
        self.ledger = Ledger()
        self.drift.new_version()

    def notice_target(self) -> None:
        """Logs a version in quarantine once."""
        self.made_for = notice(
            self.publisher.root, self.version, self.context.target.revision, self.log.report
        )

    def look_for_drift(self, text: ServedText) -> None:
        alarm = self.drift.observe(text, self.served_as)
        if alarm is not None:
            self.log.drifted(alarm)

    def look(self) -> Watched:
        """Comparison with what the version should be accepted with, and with earlier versions."""
        return self.watch.look(self.ledger, self.served_as)

    def forget(self, answers: frozenset[str]) -> None:
        self.scorer.forget(answers)
        self.watch.forget(answers)
