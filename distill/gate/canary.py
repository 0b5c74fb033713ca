"""Trial of a version on a share of live requests: accepted as the gate predicted, or less than the
live version?

A hash of its id assigns each request to the share (`drafters/versions.py`), independent
of everything else. The comparison is therefore randomised, and fair while traffic changes and with
servers that have not taken the version up. Let x in [0, 1] be the accepted part of a request's
drafted tokens (of those reached), A whether it is of the share s, and m any prediction made before
it. Then (A - s)(x - m) is on average s (1 - s) times the difference that being of the share makes
to x. A bet that pays it is fair where there is no difference, and the money won from a stake of 1
passes 1 / error with at most that chance, at any request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.config import GateConfig
from draftsmith.distill.gate.gate import decide
from draftsmith.distill.gate.scoring import Scorer
from draftsmith.distill.gate.sequential import BoundedEvidence, Evidence
from draftsmith.distill.publisher import Publisher
from draftsmith.drafters import versions
from draftsmith.drafters.versions import (
    Canary,
    in_canary,
    read_canary,
    remove_canary,
    write_canary,
)
from draftsmith.errors import UserError

# So many times `gate.canary_requests` in vain, while the live version drafts: servers do not draft
# with this one.
PATIENCE = 10
# Request classes with a level of their own, however many clients invent.
MOST_LEVELS = 64


class TrialVerdict(NamedTuple):
    decision: str  # "promoted", "rolled back", or "undecided" by what is live
    reason: str


@dataclass
class Mean:
    total: float = 0.0
    count: int = 0

    def add(self, x: float) -> None:
        self.total, self.count = self.total + x, self.count + 1

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan

    def __str__(self) -> str:
        return f"{self.value:.3f}" if self.count else "none yet"

    @property
    def guess(self) -> float:
        """Prediction of the next value; 0.5 before the first."""
        return (self.total + 0.5) / (self.count + 1)


@dataclass
class Trial:
    version: int
    share: float
    drafted: int = 0  # requests of the share that this version drafted for
    missed: int = 0  # and those that it did not draft for
    elsewhere: int = 0  # requests of the others that were drafted for
    chosen: Mean = field(default_factory=Mean)  # x of the share
    others: Mean = field(default_factory=Mean)
    # it is accepted less than the live version
    worse: BoundedEvidence = field(default_factory=BoundedEvidence)
    # it is not accepted less by `gate.drop`
    fine: BoundedEvidence = field(default_factory=BoundedEvidence)
    # x of a class of requests drafted alike, under any draft
    levels: dict[str, Mean] = field(default_factory=dict)

    def observe(self, text: ServedText, *, live: str, canary: str, drop: float) -> None:
        """Counts a request. `live` and `canary` are the versions' names in records. Requests
        drafted by another version or a server without a trained draft are left out."""
        rounds = [record for record in text.records if record.drafted]
        if any(record.draft_version not in (live, canary) for record in rounds):
            return
        is_chosen = in_canary(text.request, self.share)
        is_drafted = is_chosen and any(record.draft_version == canary for record in rounds)
        self.drafted += is_drafted
        self.missed += is_chosen and not is_drafted
        self.elsewhere += bool(rounds) and not is_chosen
        reached = sum(min(record.accepted + 1, len(record.drafted)) for record in rounds)
        # Nothing drafted is nothing accepted: that is how a version that fails, or is never sure
        # enough, shows.
        x = sum(record.accepted for record in rounds) / max(1, reached)
        self.bet(
            x,
            text.group,
            is_chosen=is_chosen,
            allowance=drop if is_drafted else 0.0,
        )

    def bet(self, x: float, request_class: str, *, is_chosen: bool, allowance: float) -> None:
        """Bets on one request. `allowance` is 0 where the version did not draft."""
        is_kept = request_class in self.levels or len(self.levels) < MOST_LEVELS
        level = self.levels.setdefault(request_class if is_kept else "", Mean())
        # At most 1, so that no bet can cost more than there is.
        weight = (is_chosen - self.share) / max(self.share, 1 - self.share)
        self.worse.bet(np.array([-weight * (x - level.guess)]))
        self.fine.bet(np.array([weight * (x - level.guess + allowance)]))
        level.add(x)
        (self.chosen if is_chosen else self.others).add(x)

    @property
    def awaited(self) -> float:
        """Number of the share's requests that the version should have drafted for, at the rate at
        which servers draft elsewhere. They draft for none where no draft pays, which is no reason
        to give a version up."""
        often = self.elsewhere / self.others.count if self.others.count else 1.0
        return (self.drafted + self.missed) * often

    def is_unseen(self, config: GateConfig) -> bool:
        """True while servers draft for next to no request: the trial waits, without evidence."""
        return (
            self.missed >= config.canary_requests
            and self.others.count > 0
            and self.drafted == 0
            and self.awaited < 1
        )

    def verdict(self, config: GateConfig) -> TrialVerdict | None:
        """Verdict by live requests, None while the trial goes on."""
        accepted = (
            f"accepted {self.chosen} in its share, {self.others} elsewhere, "
            f"in {self.drafted} requests"
        )
        if self.worse.value * config.error >= 1:
            return TrialVerdict("rolled back", accepted)
        if self.fine.value * config.error >= 1:
            return TrialVerdict("promoted", accepted)
        if (
            self.awaited >= PATIENCE * config.canary_requests
            and self.drafted < config.canary_requests
        ):
            return TrialVerdict(
                "rolled back",
                f"servers drafted with it in {self.drafted} of {self.drafted + self.missed} "
                "requests",
            )
        if self.drafted < config.canary_requests:
            return None
        if self.chosen.value < self.others.value - config.drop:
            return TrialVerdict("rolled back", accepted)
        return TrialVerdict("undecided", accepted)

    def numbers(self) -> dict[str, Any]:
        return {
            "share": self.share,
            "requests": self.drafted,
            "missed": self.missed,
            "elsewhere": self.elsewhere,
            "acceptance": self.chosen.value,
            "acceptance_elsewhere": self.others.value,
            "worse_evidence": self.worse.value,
            "fine_evidence": self.fine.value,
        }


class CanaryTrial:
    """Trial and its file `canary.json`, which name the same version or none. `follow` takes up
    changes of the file made by hand."""

    def __init__(self, publisher: Publisher, config: GateConfig):
        self.publisher, self.config = publisher, config
        self.trial: Trial | None = None
        self.is_unseen = False

    @property
    def version(self) -> int | None:
        return self.trial.version if self.trial else None

    def observe(self, text: ServedText, live: str) -> None:
        """Counts a request, `live` being the live version's name in records."""
        if self.trial is not None:
            self.trial.observe(
                text, live=live, canary=str(self.trial.version), drop=self.config.drop
            )

    def became_unseen(self) -> bool:
        """True once, when servers turn out to draft for no request."""
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
        """True when the file was changed from outside: the trial ended, or another one began."""
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
            # Servers report what is wrong with it, and draft with no version on trial either.
            return None

    def verdict(
        self, live: Scorer, window: Sequence[ServedText], *, max_depth: int
    ) -> TrialVerdict | None:
        """Verdict, None while the trial goes on. Live requests decide; where they do not suffice,
        today's held-out traffic does."""
        verdict = self.trial.verdict(self.config) if self.trial else None
        if self.trial is None or verdict is None or verdict.decision == "rolled back":
            return verdict
        try:
            drafter = self.publisher.load(
                versions.open_version(self.publisher.root, self.trial.version)
            )
        except UserError as error:
            return TrialVerdict("rolled back", str(error))
        if verdict.decision == "promoted":
            return verdict
        held_out = decide(
            live, drafter, window, self.config, max_depth=max_depth, evidence=Evidence()
        )
        if held_out.comparison is None:
            return TrialVerdict("rolled back", f"{verdict.reason}; {held_out.reason}")
        gain, requests = held_out.comparison.gain, held_out.comparison.requests
        decision = "promoted" if gain > 0 else "rolled back"
        return TrialVerdict(
            decision,
            f"{verdict.reason}, which does not decide it; gain {gain:+.4f} on {requests} held-out "
            "requests",
        )
