"""`draftsmith audit` with records: joins the audit, which reports, to the monitor, which reads
buffers."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from draftsmith.progress import factor, loading
from draftsmith.serve.audit.config import AuditConfig, check

if TYPE_CHECKING:
    from draftsmith.distill.monitor.monitor import EvidenceStream, Look
    from draftsmith.serve.audit.report import Check, Report

DECIDED = ("accepted", "emitted")  # by verification; greedy text leaves nothing to chance


def run(config: AuditConfig) -> int:
    from draftsmith.serve.audit.client import AuditClient  # not for the options

    # Before torch, which takes seconds to import.
    check(config)
    if config.buffer is not None:
        from draftsmith.distill.buffer.folder import check_written

        check_written(config.buffer)
    for url in filter(None, (config.url, config.compare_url)):
        AuditClient.connect(config, url).http.close()
    with loading():
        from draftsmith.serve.audit.command import run as audit

    return audit(config, audit_buffer)


def audit_buffer(config: AuditConfig) -> Report:
    from draftsmith.distill.monitor.monitor import look
    from draftsmith.serve.audit.report import Report

    assert config.buffer is not None
    found = look(config.buffer, false_alarm=config.false_alarm)
    checks = [check_of(name, stream, config) for name, stream in found.monitor.named().items()]
    subject, notes = f"the records in {config.buffer}", notes_of(found)
    sampled = any(found.monitor.everything.counts[event].count for event in DECIDED)
    return Report(subject, config.false_alarm, checks, notes, greedy_only=not sampled)


def check_of(name: str, stream: EvidenceStream, config: AuditConfig) -> Check:
    """Check of one engine's version, or of all records, which alone may be blind: a new version has
    few records."""
    from draftsmith.distill.monitor.monitor import sentence
    from draftsmith.serve.audit.report import Check

    passed = stream.log_evidence < stream.log_level(config.false_alarm)
    sampled = {event: one for event, one in stream.counts.items() if one.count}
    smallest = {event: stream.visible(event, config.false_alarm) for event in sampled}
    decided = [smallest[event] for event in DECIDED if event in smallest]
    least = min(decided, default=0.0 if stream.greedy else 1.0)
    said = sentence(name, stream).partition(": ")[2] or "no sampled positions"
    if stream.greedy:
        said += f"; {stream.greedy} greedy positions, {stream.violations} wrong"
    if decided:
        said += f"; detects a bias of {least:.2g}"
    log10 = stream.log_evidence / math.log(10)
    said += f"; evidence {factor(log10)}" if math.isfinite(log10) else "; impossible tokens"
    return Check(
        name=name,
        kind="check",
        passed=passed,
        said=said,
        evidence={
            **asdict(stream),
            "z": {event: one.z for event, one in sampled.items()},
            "log_evidence": min(stream.log_evidence, 1e9),
            "log_level": stream.log_level(config.false_alarm),
            "detectable_bias": smallest,
        },
        blind=passed and name == "all" and least > config.bias,
        ask="more records of requests without seeds, drafted as chains (serve --learn FOLDER)",
    )


def notes_of(found: Look) -> list[str]:
    notes = [f"{found.records} records in {found.shards} shards"]
    notes += [f"left out: {count} {reason}" for reason, count in found.monitor.left_out.items()]
    if found.seeded:
        notes.append(f"left out: {found.seeded} records of seeded requests")
    if found.damaged:
        notes.append(f"left out: {found.damaged} shards that cannot be read")
    return notes
