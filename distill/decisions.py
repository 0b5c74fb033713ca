"""Decisions of a draft track: a line of `decisions.jsonl` and a line for people for each, and the
counts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.distill.context import LearnerContext
from draftsmith.distill.gate.drift import Alarm
from draftsmith.distill.gate.gate import Decision
from draftsmith.drafters.published import versions


class DecisionLog:
    """Log of the track of class `name`, "" for all classes.

    A line that a full disk refuses waits for `flush`: a failed write must not separate a decision
    from its consequences.
    """

    def __init__(self, root: Path, context: LearnerContext, name: str):
        self.root, self.context, self.name = root, context, name
        self.waiting: list[dict[str, Any]] = []

    def report(self, text: str) -> None:
        """Prints a line for people."""
        self.context.report(f"class {self.name!r}: {text}" if self.name else text)

    def add(self, decision: Mapping[str, Any]) -> None:
        self.waiting.append({"time_s": time.time(), **decision})
        self.flush()

    def flush(self) -> None:
        while self.waiting:
            try:
                versions.record_decision(self.root, self.waiting[0])
            except OSError as error:
                self.report(f"{error}; {len(self.waiting)} decisions wait to be logged")
                return
            del self.waiting[0]

    def gated(
        self, decision: Decision, *, live: int, version: int | None, share: float, updates: int
    ) -> None:
        """A gate decision with its numbers. `version` is the published one, `share` its canary
        share."""
        numbers = {**decision.to_dict(), "live": live, "version": version, "share": share}
        self.add({**numbers, "updates": updates})
        self.context.counters.count(decision.decision)
        self.report(describe(decision, version, share))

    def rolled_back(self, left: int, version: int, numbers: Mapping[str, Any]) -> None:
        self.context.counters.rolled_back += 1
        self.add({"decision": "rolled back", "left": left, "version": version, **numbers})
        self.report(f"version {left} is rolled back to {version}: {numbers['reason']}")

    def promoted(self, version: int, left: int, numbers: Mapping[str, Any]) -> None:
        self.add({"decision": "promoted", "version": version, "live": left, **numbers})
        self.report(f"version {version} is promoted after its trial: {numbers['reason']}")

    def drifted(self, alarm: Alarm) -> None:
        self.context.counters.drift_alarms += 1
        self.add({"decision": "drift", "reason": alarm.describe(), **asdict(alarm)})
        self.report(f"drift: {alarm.describe()}")


def describe(decision: Decision, version: int | None, share: float) -> str:
    """Line for people. `share` is that of a version on trial."""
    comparison = decision.comparison
    text = f"version {version} published" if version else decision.decision
    text += f" for a share of {share:g} of the requests" if share else ""
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
