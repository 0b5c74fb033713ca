"""Figures of what an engine serves, by version of the draft: alpha, tau and losslessness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.distill.monitor.monitor import Key, Monitor, name_of
from draftsmith.record import RoundRecord

# Chance that an engine which samples rightly ever raises an alarm.
FALSE_ALARM = 1e-3
# Records that are judged at once: numbers of arrays, not of calls, should cost.
BATCH = 256
# Versions whose figures are kept: the latest.
VERSIONS = 16


@dataclass
class VersionCounts:
    """Counts of rounds with drafted tokens. `reached` positions are those that verification came
    to: the accepted ones and the first rejected one of each round."""

    rounds: int = 0
    reached: int = 0
    accepted: int = 0

    def add(self, record: RoundRecord) -> None:
        self.rounds += 1
        self.accepted += record.accepted
        self.reached += min(record.accepted + 1, len(record.drafted))


@dataclass
class ServedFigures:
    engine: str
    monitor: Monitor = field(default_factory=lambda: Monitor(FALSE_ALARM))
    versions: dict[str, VersionCounts] = field(default_factory=dict)
    waiting: list[RoundRecord] = field(default_factory=list)

    def add(self, records: Sequence[RoundRecord]) -> list[str]:
        """Count records; returns the alarms that they raise, one sentence each."""
        for one in records:
            if one.drafted:
                self.versions.setdefault(one.draft_version, VersionCounts()).add(one)
            if one.drafted and not one.seeded:
                self.waiting.append(one)
        while len(self.versions) > VERSIONS:
            del self.versions[next(iter(self.versions))]
        return self.judge() if len(self.waiting) >= BATCH else []

    def judge(self) -> list[str]:
        """Judge the records that wait for it."""
        waiting, self.waiting = self.waiting, []
        return self.monitor.look(waiting) if waiting else []

    def figures(self) -> dict[str, dict[str, float]]:
        """Figures by version: rounds, reached positions, alpha, tau; z of `accepted`, log10 of the
        evidence against losslessness, and 1 under `alarm` where it was enough."""
        judged = self.monitor.numbers()
        return {
            version: {
                "rounds": counts.rounds,
                "positions": counts.reached,
                "accepted": counts.accepted,
                "alpha": counts.accepted / max(1, counts.reached),
                "tau": 1 + counts.accepted / max(1, counts.rounds),
                **_losslessness(judged.get(name_of(Key(self.engine, version)), {})),
            }
            for version, counts in self.versions.items()
        }


def _losslessness(numbers: dict[str, Any]) -> dict[str, float]:
    return {
        "judged": numbers.get("positions", 0),
        "z": numbers.get("z_accepted", 0.0),
        "log10_evidence": numbers.get("log10_evidence", 0.0),
        "alarm": numbers.get("alarm", 0.0),
    }
