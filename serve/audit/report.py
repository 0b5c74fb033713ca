"""Report of an audit: checks that must hold, controls that must be caught, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from draftsmith.kernels.statistics import Fit, detectable_bias


@dataclass(frozen=True, kw_only=True)
class Check:
    """A `check` must hold; a `control` is broken on purpose and `passed` means that the audit
    detected it.

    `blind`: a check without the power to detect a bias of the size that matters; `ask` names
    options that give it.
    """

    name: str
    kind: Literal["check", "control"]
    passed: bool
    said: str  # the evidence in one line
    evidence: dict[str, Any] = field(default_factory=dict)
    blind: bool = False
    ask: str = ""


Verdict = Literal["lossless", "lossy", "powerless"]


@dataclass(frozen=True)
class Report:
    subject: str
    false_alarm: float
    checks: Sequence[Check]
    notes: Sequence[str] = ()
    greedy_only: bool = False  # no sampled text was there to test

    @property
    def verdict(self) -> Verdict:
        """Lossy with any broken check; else lossless when every control was caught, and no check is
        missing or blind."""
        if any(check.kind == "check" and not check.passed for check in self.checks):
            return "lossy"
        powerful = all(check.passed and not check.blind for check in self.checks)
        return (
            "lossless"
            if powerful and any(check.kind == "check" for check in self.checks)
            else "powerless"
        )

    def sentence(self) -> str:
        broken = ", ".join(
            check.name for check in self.checks if check.kind == "check" and not check.passed
        )
        unseen = [
            check
            for check in self.checks
            if check.blind or (check.kind == "control" and not check.passed)
        ]
        missed = ", ".join(check.name for check in unseen)
        asks = "; ".join(dict.fromkeys(check.ask for check in unseen if check.ask))
        return {
            "lossless": (
                "LOSSLESS: every check held and every control was caught (false alarm "
                f"{self.false_alarm:g} over all)"
            )
            + ("; of greedy text alone, sampled text was not tested" if self.greedy_only else ""),
            "lossy": f"LOSSY: {broken}",
            "powerless": (
                "NO VERDICT: no distribution is broken, but checks lack power or controls were not "
                f"caught ({missed or 'nothing was run'})"
            )
            + (f": {asks}" if asks else ""),
        }[self.verdict]

    def lines(self) -> list[str]:
        width = max((len(check.name) for check in self.checks), default=0)
        marks = {
            ("check", True): "held",
            ("check", False): "BROKEN",
            ("control", True): "caught",
            ("control", False): "MISSED",
        }
        rows = [
            f"  {check.name:<{width}}  "
            f"{'BLIND' if check.blind else marks[check.kind, check.passed]:<6}  {check.said}"
            for check in self.checks
        ]
        return [
            f"audit of {self.subject}",
            *rows,
            *(f"  note: {note}" for note in self.notes),
            self.sentence(),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "subject": self.subject,
            "verdict": self.verdict,
            "sentence": self.sentence(),
            "false_alarm": self.false_alarm,
            "checks": [asdict(check) for check in self.checks],
            "notes": list(self.notes),
        }


def fit_check(name: str, kind: Literal["check", "control"], fit: Fit, false_alarm: float) -> Check:
    """Check of a fit. A distribution holds when its p-value stays at or above the false-alarm rate;
    a control is caught when it does not. A distribution in which any bias would be missed is blind.
    """
    rejected = fit.p_value < false_alarm
    power = detectable_bias(fit.num_samples, fit.degrees, false_alarm)
    said = (
        f"statistic {fit.statistic:.1f} on {fit.degrees} degrees, p {fit.p_value:.2g}, "
        f"{fit.num_samples} samples"
    )
    if kind == "check":
        said += f", detects a bias of {power:.2g}"
    evidence = {**fit._asdict(), "false_alarm": false_alarm, "detectable_bias": power}
    passed = rejected == (kind == "control")
    blind = kind == "check" and passed and power >= 1
    return Check(name=name, kind=kind, passed=passed, said=said, evidence=evidence, blind=blind)
