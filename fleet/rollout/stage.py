"""Verdict about one stage of a rollout, by bets that may be looked at after every pair of periods.

In each pair a coin decides which period has the candidate. If neither version is better, swapping
their names changes nothing, so that a difference d is as likely as -d: the bets of
`distill/gate/sequential.py` are fair, whatever the time of day or the requests that came. That the
candidate is worse is bet on with -d, that it is not worse by `drop` with d + drop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from draftsmith.distill.gate.sequential import TurningEvidence
from draftsmith.fleet.config import RolloutConfig

WINDOW = 64  # latest differences, from which the sizes of bets are taken
# Pairs of periods without a single difference, from which on a stage waits for what may never come.
UNSEEN = 4


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
        return asdict(self) | {"gain": self.gain, "is_blind": self.is_blind}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StageTrial:
        read = {name: value for name, value in values.items() if name not in ("gain", "is_blind")}
        read |= {name: TurningEvidence(**read[name]) for name in ("worse", "fine") if name in read}
        return cls(**read)
