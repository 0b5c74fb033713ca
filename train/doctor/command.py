"""`draftsmith doctor`: checks of a target, draft and data before they run, or of the server at a
URL."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.drafters.config import check_draft_options
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.train.data.folders import folders_of
from draftsmith.train.doctor.config import DoctorConfig
from draftsmith.train.doctor.finding import FAIL, Finding, table
from draftsmith.train.quiet import quiet


def run(config: DoctorConfig) -> int:
    config = with_target(config)
    check_options(config)
    findings = examine(config)
    failed = any(finding.status == FAIL for finding in findings)
    if os.environ.get("RANK", "0") != "0":
        return 1 if failed else 0
    if config.json:
        print(json.dumps(report(findings), indent=2))
    else:
        show_data(config, findings)
        print(f"{table(findings)}\n\n{summary(findings)}")
    return 1 if failed else 0


def show_data(config: DoctorConfig, findings: list[Finding]) -> None:
    """The first texts, if they could be read and spelt."""
    if (
        config.show == 0
        or not config.data
        or config.target is None
        or not any(finding.check == "data.ends" for finding in findings)
    ):
        return
    from draftsmith.train.doctor.data import shown

    for folder in folders_of(config.data):
        text = shown(
            folder.path,
            config.target,
            count=config.show,
            max_length=config.max_length,
            in_colour=sys.stdout.isatty(),
            trust_remote_code=config.trust_remote_code,
        )
        print(f"{text}\n")


def with_target(config: DoctorConfig) -> DoctorConfig:
    """Adds the target that wrote the data, as its provenance names it, where the data alone is
    given."""
    if not config.data or config.target is not None or config.url is not None:
        return config
    first = Path(folders_of(config.data)[0].path)
    written_by = read_json(first / "provenance.json", "data provenance").get("target")
    return replace(config, target=written_by)


def examine(config: DoctorConfig) -> list[Finding]:
    """All findings. A server is asked without loading what models need."""
    if config.url is not None:
        from draftsmith.train.doctor.server import check_server

        return check_server(config.url, seconds=config.seconds, api_key=config.api_key)
    quiet()
    from draftsmith.train.doctor.offline import check_pair

    return check_pair(config)


def check_options(config: DoctorConfig) -> None:
    if config.target is None and config.url is None:
        raise UserError("option 'target' is required; give --target, or --url of a running server")
    if config.url is not None and (config.data or (config.target, config.draft) != (None, None)):
        raise UserError(
            "url is given together with a target, draft or data; ask about them one at a time"
        )
    check_draft_options(config)
    if config.target_shares > 1 or config.target_offload is not None:
        check_target_place(config)
    processes = os.environ.get("WORLD_SIZE") or "1"
    if config.url is not None and processes != "1":
        raise UserError(
            f"WORLD_SIZE is {processes}, but one process asks a server; give --url without a "
            "launcher"
        )
    if config.url is None and (config.seconds != 0 or config.api_key is not None):
        raise UserError("seconds and api_key are about a running server; give --url too")


def check_target_place(config: DoctorConfig) -> None:
    # Late: a server is asked without importing what models need.
    quiet()
    from draftsmith.drafters.target.sharded import check_offload, check_shares

    check_shares(config.target_shares, "doctor")
    check_offload(config.target_offload, shares=config.target_shares, dtype="auto")
    if config.target_offload is not None and config.target is None:
        raise UserError(
            f"--target-offload is {config.target_offload!r} and no target is given; give one, or "
            "leave it out"
        )


def report(findings: list[Finding]) -> dict[str, Any]:
    return {"findings": [finding._asdict() for finding in findings], **counts(findings)}


def counts(findings: list[Finding]) -> dict[str, int]:
    found = Counter(finding.status for finding in findings)
    return {status: found[status] for status in ("ok", "warn", "fail")}


def summary(findings: list[Finding]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts(findings).items())
