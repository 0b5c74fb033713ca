"""`draftsmith doctor`: what would go wrong with this target, draft and data, or what does with the server at this URL."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.target import Target
from draftsmith.errors import UserError
from draftsmith.train.checkup.data import check_data, read_sample
from draftsmith.train.checkup.draft import check_draft
from draftsmith.train.checkup.finding import FAIL, Finding, refused, table
from draftsmith.train.checkup.law import check_law
from draftsmith.train.checkup.memory import check_serving, check_training
from draftsmith.train.checkup.server import check_server
from draftsmith.train.checkup.target import check_target
from draftsmith.train.doctor_config import DoctorConfig
from draftsmith.train.place import find_place
from draftsmith.train.quiet import quiet

MOST_SECONDS = 3600.0


def run(config: DoctorConfig) -> int:
    quiet()
    check_options(config)
    if config.url is not None:
        findings = check_server(config.url, seconds=config.seconds, api_key=config.api_key)
    else:
        findings = examine(config)
    failed = any(finding.status == FAIL for finding in findings)
    print(json.dumps(report(findings), indent=2) if config.json else f"{table(findings)}\n\n{summary(findings)}")
    return 1 if failed else 0


def check_options(config: DoctorConfig) -> None:
    if config.target is None and config.url is None:
        raise UserError("option 'target' is required; give --target, or --url of a running server")
    if config.url is not None and (config.target, config.draft, config.data) != (None, None, None):
        raise UserError("url is given together with a target, draft or data; ask about them one at a time")
    if config.url is None and (config.seconds != 0 or config.api_key is not None):
        raise UserError("seconds and api_key are about a running server; give --url too")
    if not 0 <= config.seconds <= MOST_SECONDS:
        raise UserError(f"seconds is {config.seconds:g}; it must be from 0 to {MOST_SECONDS:g}")
    if config.rows < 1 or config.max_length < 2 or config.sequences < 1:
        raise UserError("--rows and --sequences must be at least 1 and --max-length at least 2; raise them")


def examine(config: DoctorConfig) -> list[Finding]:
    """Every check that still makes sense after the ones before it."""
    assert config.target is not None
    try:
        target = Target.load(config.target, device=find_place("auto").device)
    except UserError as error:
        return [refused("target.loads", error)]
    findings = check_target(target)
    draft = None
    if config.draft is not None:
        try:
            draft = checkpoint.load(config.draft, target)
        except UserError as error:
            findings.append(refused("draft.loads", error))
        else:
            findings += check_draft(config.draft, draft, target)
    findings.append(check_serving(target, draft, config.sequences))
    if draft is not None:
        findings.append(check_training(target, draft, config.max_length))
    if config.data is not None:
        findings += examine_data(config, config.data, target, draft)
    return findings


def examine_data(config: DoctorConfig, folder: str, target: Target, draft: TrainedDrafter | None) -> list[Finding]:
    try:
        sample = read_sample(folder, config.rows)
    except UserError as error:
        return [refused("data.reads", error)]
    findings = check_data(folder, sample, target, config.max_length)
    if not any(finding.status == FAIL for finding in findings):
        findings += check_law(sample.rows, sampled_at(sample.provenance), target, draft)
    return findings


def sampled_at(provenance: dict[str, Any]) -> float | None:
    """The temperature, where the text was drawn from the whole law; a greedy choice no filter changes."""
    temperature = provenance.get("temperature")
    filtered = provenance.get("top_k", 0) != 0 or provenance.get("top_p", 1.0) != 1.0
    return None if filtered and temperature != 0 else temperature


def report(findings: list[Finding]) -> dict[str, Any]:
    return {"findings": [finding._asdict() for finding in findings], **counts(findings)}


def counts(findings: list[Finding]) -> dict[str, int]:
    found = Counter(finding.status for finding in findings)
    return {status: found[status] for status in ("ok", "warn", "fail")}


def summary(findings: list[Finding]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts(findings).items())
