"""`draftsmith doctor`: checks of a target, draft and data before they run, or of the server at a
URL."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.config import without_login
from draftsmith.drafters.config import check_draft_options
from draftsmith.drafters.layouts.hub import check_named
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.progress import loading, say
from draftsmith.train.check.finding import FAIL, Finding, ok, refused, table
from draftsmith.train.check.server import check_server
from draftsmith.train.config import DoctorConfig
from draftsmith.train.data.folders import folders_of
from draftsmith.train.quiet import quiet


def run(config: DoctorConfig) -> int:
    config = with_target(config)
    check_options(config)
    findings = examine(config) if config.json else in_brief(examine(config))
    found = Counter(finding.status for finding in findings)
    counts = {status: found[status] for status in ("ok", "warn", "fail")}
    if config.json:
        report = {"findings": [finding._asdict() for finding in findings], **counts}
        print(json.dumps(report, indent=2))
    else:
        show_data(config, findings)
        summary = ", ".join(f"{count} {status}" for status, count in counts.items())
        print(f"{table(findings)}\n\n{summary}")
    return 1 if counts[FAIL] else 0


def in_brief(findings: list[Finding]) -> list[Finding]:
    """The findings with one line for all ways of a CPU."""
    ways = [finding for finding in findings if finding.check == "cpu.ways"]
    if len(ways) < 2:
        return findings
    begin = findings.index(ways[0])
    what = f"for {len(ways)} shapes of work the fastest way here is taken; --json lists them"
    return [*findings[:begin], ok("cpu.ways", what), *findings[begin + len(ways) :]]


def with_target(config: DoctorConfig) -> DoctorConfig:
    """Adds the target that wrote the data, as its provenance names it, where the data alone is
    given."""
    if not config.data or config.target is not None or config.url is not None:
        return config
    first = Path(folders_of(config.data)[0].path)
    written_by = read_json(first / "provenance.json", "data provenance").get("target")
    return replace(config, target=written_by)


def check_options(config: DoctorConfig) -> None:
    if config.target is None and config.url is None:
        raise UserError("option 'target' is required; give --target, or --url of a running server")
    if config.url is not None and (config.data or config.draft or config.target):
        raise UserError("url is given together with a model or data; ask about them one at a time")
    check_draft_options(config)


def examine(config: DoctorConfig) -> list[Finding]:
    """All findings. A server is asked without loading a model, and a target looked for without
    torch, which takes seconds to import."""
    try:
        check_named(replace(config, draft=None))
    except UserError as error:
        return [refused("target.loads", error)]
    if config.url is not None:
        say(f"asking {without_login(config.url)}")
        return check_server(config.url)
    return check_models(config)


def check_models(config: DoctorConfig) -> list[Finding]:
    """Every check that still makes sense after the ones before it."""
    with loading():  # late: a server is asked without importing what models need
        quiet()
        from draftsmith.drafters import checkpoint
        from draftsmith.drafters.target.device import device_of, load_target, weight_dtype
        from draftsmith.train.check.memory import check_fit, check_serving, check_training
        from draftsmith.train.check.models import check_draft, check_target

    assert config.target is not None
    name, trust, offload = config.target, config.trust_remote_code, config.target_offload
    device = device_of()
    dtype = weight_dtype("auto", device, name, trust_remote_code=trust)
    fits = check_fit(name, device, dtype=dtype, offload=offload, trust_remote_code=trust)
    findings = [] if fits is None else [fits]
    if fits is not None and fits.status == FAIL:
        return findings
    try:
        target = load_target(
            name,
            dtype=dtype,
            offload=offload,
            max_length=config.max_length,
            trust_remote_code=trust,
        )
    except UserError as error:
        return [*findings, refused("target.loads", error)]
    findings += check_target(target, laid_out=offload is None)
    draft = None
    try:
        draft = checkpoint.load_draft(config, target)
    except UserError as error:
        findings.append(refused("draft.loads", error))
    if draft is not None:
        findings += check_draft(config, draft, target)
    findings.append(check_serving(target, draft, config.sequences))
    if draft is not None and not config.heterogeneous_vocab:
        findings.append(check_training(target, draft, config.max_length, offload=offload))
    for folder in (folders := [one.path for one in folders_of(config.data)]):
        found = check_folder(config, folder, target)
        named = "" if len(folders) == 1 else f"{folder}: "
        findings += [one._replace(what=named + one.what) for one in found]
    return findings


def check_folder(config: DoctorConfig, folder: str, target: Any) -> list[Finding]:
    from draftsmith.train.check.data import check_data, check_distribution, read_sample

    try:
        sample = read_sample(folder, config.rows)
    except UserError as error:
        return [refused("data.reads", error)]
    findings = check_data(sample, target, config.max_length)
    if not any(finding.status == FAIL for finding in findings):
        findings += check_distribution(sample, target)
    return findings


def show_data(config: DoctorConfig, findings: list[Finding]) -> None:
    """Prints the first texts, if they could be read."""
    if not config.show or not any(finding.check == "data.masks" for finding in findings):
        return
    from draftsmith.drafters.target.load import load_tokenizer
    from draftsmith.train.check.data import shown

    assert config.target is not None
    tokenizer = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    for folder in folders_of(config.data):
        print(shown(folder.path, tokenizer, count=config.show, max_length=config.max_length))
