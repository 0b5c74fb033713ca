"""Findings of checks, and their table."""

from __future__ import annotations

from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"


class Finding(NamedTuple):
    status: str  # ok, warn or fail
    check: str  # what was looked at, as part.aspect
    what: str  # what was seen
    mend: str = ""  # what to do about it; empty when ok


def ok(check: str, what: str) -> Finding:
    return Finding(OK, check, what)


def warn(check: str, what: str, mend: str) -> Finding:
    return Finding(WARN, check, what, mend)


def fail(check: str, what: str, mend: str) -> Finding:
    return Finding(FAIL, check, what, mend)


def refused(check: str, error: ValueError) -> Finding:
    """A `UserError` as a finding: its sentence is `what; mend`."""
    what, _, mend = str(error).rpartition("; ")
    return fail(check, what or mend, mend if what else "")


def table(findings: list[Finding]) -> str:
    """One line a finding, the mend below it where there is one."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<5} {finding.check:<{width}}  {finding.what}")
        if finding.mend:
            lines.append(f"{'':<5} {'':<{width}}  -> {finding.mend}")
    return "\n".join(lines)
