"""The version on trial as the learner handles it: `canary.json`, the trial it stands for, and how that ends."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import GateConfig
from draftsmith.distill.gate.canary import Trial, Verdict
from draftsmith.distill.gate.gate import decide
from draftsmith.distill.gate.scoring import Scorer
from draftsmith.distill.gate.sequential import Evidence
from draftsmith.distill.publisher import Publisher
from draftsmith.drafters.published import versions
from draftsmith.drafters.published.canary import Canary, read_canary, remove_canary, write_canary
from draftsmith.errors import UserError


class CanaryDesk:
    """`trial` and the file name the same version, or both none, but for what somebody writes by hand, which `follow` takes up."""

    def __init__(self, publisher: Publisher, config: GateConfig):
        self.publisher, self.config = publisher, config
        self.trial: Trial | None = None
        self.is_unseen = False

    @property
    def version(self) -> int | None:
        return self.trial.version if self.trial else None

    def observe(self, text: ServedText, live: str) -> None:
        """`live` as records name it."""
        if self.trial is not None:
            self.trial.observe(text, live=live, canary=str(self.trial.version), drop=self.config.drop)

    def notices_silence(self) -> bool:
        """True once, when servers turn out to draft for nobody."""
        was_unseen = self.is_unseen
        self.is_unseen = self.trial is not None and self.trial.is_unseen(self.config)
        return self.is_unseen and not was_unseen

    def begin(self, version: int) -> None:
        write_canary(self.publisher.root, Canary(version, self.config.canary))
        self.trial = Trial(version, self.config.canary)

    def end(self) -> None:
        remove_canary(self.publisher.root)
        self.trial = None

    def follow(self) -> bool:
        """True when somebody ended the trial, or began another one."""
        own = Canary(self.trial.version, self.trial.share) if self.trial else None
        named = self._named()
        if named == own:
            return False
        self.trial = Trial(*named) if named else None
        return True

    def _named(self) -> Canary | None:
        try:
            return read_canary(self.publisher.root)
        except UserError:
            # Servers say what is wrong with it, and draft with no version on trial either.
            return None

    def judge(self, live: Scorer, window: Sequence[ServedText], *, max_depth: int) -> Verdict | None:
        """None while it goes on. What is live decides; where that does not suffice, held-out traffic as it is by now."""
        verdict = self.trial.verdict(self.config) if self.trial else None
        if self.trial is None or verdict is None or verdict.decision == "rolled back":
            return verdict
        try:
            drafter = self.publisher.load(versions.open_version(self.publisher.root, self.trial.version))
        except UserError as error:
            return Verdict("rolled back", str(error))
        if verdict.decision == "promoted":
            return verdict
        held_out = decide(live, drafter, window, self.config, max_depth=max_depth, evidence=Evidence())
        if held_out.comparison is None:
            return Verdict("rolled back", f"{verdict.reason}; {held_out.reason}")
        gain, requests = held_out.comparison.gain, held_out.comparison.requests
        decision = "promoted" if gain > 0 else "rolled back"
        return Verdict(decision, f"{verdict.reason}, which does not decide it; gain {gain:+.4f} on {requests} held-out requests")
