"""All checks of a target, its draft and their data before they run."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import ForwardCapturable, TrainedDrafter
from draftsmith.drafters.target.device import device_of, load_target, weight_dtype
from draftsmith.drafters.target.load import load_config
from draftsmith.drafters.target.ranks import leave_group, started
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.data.folders import folders_of
from draftsmith.train.doctor.config import DoctorConfig
from draftsmith.train.doctor.data import check_data, read_sample
from draftsmith.train.doctor.distributions import check_distribution
from draftsmith.train.doctor.draft import check_draft
from draftsmith.train.doctor.finding import FAIL, Finding, refused
from draftsmith.train.doctor.memory import check_fit, check_serving, check_training
from draftsmith.train.doctor.processes import check_group, check_spread, fit_of_all
from draftsmith.train.doctor.target import check_offloaded, check_target, check_ways


def check_pair(config: DoctorConfig) -> list[Finding]:
    """Every check that still makes sense after the ones before it."""
    if started() == 1:
        return check_models(config, [])
    try:
        findings = check_group()
        is_ready = all(finding.status != FAIL for finding in findings)
        return check_models(config, findings) if is_ready else findings
    finally:
        leave_group()


def check_models(config: DoctorConfig, findings: list[Finding]) -> list[Finding]:
    """Adds to the findings on the processes those on target, draft and data."""
    begun_s = perf_counter()
    assert config.target is not None
    device, trust = device_of(), config.trust_remote_code
    dtype = weight_dtype("auto", device, config.target, trust_remote_code=trust)
    fits = check_fit(
        config.target,
        device,
        dtype=dtype,
        shares=config.target_shares,
        offload=config.target_offload,
        trust_remote_code=trust,
    )
    if started() > 1:
        fits = fit_of_all(fits)
    if fits is not None:
        findings.append(fits)
        if fits.status == FAIL:
            return findings
    try:
        target = open_target(config, dtype)
    except UserError as error:
        return [*findings, refused("target.loads", error)]
    if config.target_shares > 1:
        loaded_s = perf_counter() - begun_s
        findings.append(check_spread(target, config.target_shares, loaded_s))
    if config.target_offload is not None:
        findings.append(check_offloaded(target, config.target_offload))
    elif config.target_shares == 1:
        findings += check_ways(target)
    findings += check_target(target)
    draft = None
    try:
        draft = checkpoint.load_draft(config, target)
    except UserError as error:
        findings.append(refused("draft.loads", error))
    if draft is not None:
        findings += check_draft(config, draft, target)
        if isinstance(draft, ForwardCapturable):
            draft.capture_forward()  # as a server does, whose buffers it then has
    findings.append(check_serving(target, draft, config.sequences))
    if draft is not None and not config.heterogeneous_vocab:
        findings.append(
            check_training(
                target,
                draft,
                config.max_length,
                shares=config.target_shares,
                offload=config.target_offload,
            )
        )
    folders = [folder.path for folder in folders_of(config.data)]
    for folder in folders:
        found = check_examples(config, folder, target, draft)
        findings += found if len(folders) == 1 else [of_folder(one, folder) for one in found]
    return findings


def open_target(config: DoctorConfig, dtype: torch.dtype | str) -> Target:
    assert config.target is not None
    trust = config.trust_remote_code
    if config.target_shares > 1:
        # A wrong folder is refused by every process, before one waits for another.
        load_config(config.target, trust_remote_code=trust)
    return load_target(
        config.target,
        dtype=dtype,
        offload=config.target_offload,
        max_length=config.max_length,
        shares=config.target_shares,
        trust_remote_code=trust,
    )


def of_folder(finding: Finding, folder: str) -> Finding:
    """A finding about one of several folders, which it names."""
    return finding._replace(what=f"{folder}: {finding.what}")


def check_examples(
    config: DoctorConfig, folder: str, target: Target, draft: TrainedDrafter | None
) -> list[Finding]:
    try:
        sample = read_sample(folder, config.rows)
    except UserError as error:
        return [refused("data.reads", error)]
    findings = check_data(folder, sample, target, config.max_length)
    if not any(finding.status == FAIL for finding in findings):
        findings += check_distribution(sample.rows, sampled_at(sample.provenance), target, draft)
    return findings


def sampled_at(provenance: dict[str, Any]) -> float | None:
    """The temperature, where the text was drawn from one whole distribution; a greedy choice no
    filter changes."""
    temperature = provenance.get("temperature")
    if isinstance(temperature, list):
        return None
    filtered = provenance.get("top_k", 0) != 0 or provenance.get("top_p", 1.0) != 1.0
    return None if filtered and temperature != 0 else temperature
