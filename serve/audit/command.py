"""`draftsmith audit`: is speculation lossless here? Exit status 0 only when every distribution held
and every control was caught."""

from __future__ import annotations

import torch

from draftsmith.errors import UserError
from draftsmith.files import write_json
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.kernels.checks import audit_kernels
from draftsmith.serve.audit.report import Report
from draftsmith.serve.audit.server import audit_server

DEVICES = ("cpu", "cuda")


def run(config: AuditConfig) -> int:
    check(config)
    reports: list[Report] = []
    if config.kernels:
        reports.append(audit_kernels(config))
    if config.url is not None:
        reports.append(audit_server(config))
    for report in reports:
        print("\n".join(report.lines()))
    if config.out:
        write_json(config.out, [report.to_dict() for report in reports])
    return 0 if all(report.verdict == "lossless" for report in reports) else 1


def check(config: AuditConfig) -> None:
    if not config.kernels and config.url is None:
        raise UserError("nothing to audit; give --kernels, or --url with the address of a server")
    for name in ("contexts", "samples", "choices", "concurrency", "rounds", "greedy_tokens"):
        if (value := vars(config)[name]) < 1:
            raise UserError(f"{name} is {value}; give at least 1")
    if config.device.partition(":")[0] not in DEVICES or (
        config.device != "cpu" and not torch.cuda.is_available()
    ):
        raise UserError(
            f"device {config.device!r} is not to be had here; give cpu, or cuda where there is a "
            "CUDA device"
        )
    if not 0 < config.false_alarm < 1:
        raise UserError(
            f"false_alarm is {config.false_alarm}; it is a chance and must lie between 0 and 1"
        )
    if config.temperature < 0:
        raise UserError(
            f"temperature is {config.temperature}; give 0 for greedy text alone, or more"
        )
    if config.compare_url is not None and config.url is None:
        raise UserError(
            f"compare_url is {config.compare_url!r}, but nothing is to be compared with it; give "
            "--url, too"
        )
    for name, least in (("length", 1), ("k", 0)):
        if (value := vars(config)[name]) is not None and value < least:
            raise UserError(f"{name} is {value}; give at least {least}")
    if not 0 < config.bias < 1:
        raise UserError(
            f"bias is {config.bias}; it is a total variation and must lie between 0 and 1"
        )
