"""`draftsmith audit`: statistical test that speculation is lossless. Exit status 0 only when every
distribution held and every control was caught."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftsmith.config import check_limits
from draftsmith.errors import UserError
from draftsmith.files import check_file, write_json
from draftsmith.prompts.suites import check_suite, is_given
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.kernels import audit_kernels
from draftsmith.serve.audit.report import Report
from draftsmith.serve.audit.server import audit_server

AuditBuffer = Callable[[AuditConfig], Report]

DEVICES = ("cpu", "cuda")


def run(config: AuditConfig, audit_buffer: AuditBuffer | None = None) -> int:
    """`audit_buffer` is called when the config names a buffer; this package cannot read records."""
    check(config)
    if config.buffer is not None and audit_buffer is None:
        raise UserError(
            f"buffer is {config.buffer!r}, but nothing reads records here; run `draftsmith audit`"
        )
    reports: list[Report] = []
    if config.kernels:
        reports.append(audit_kernels(config))
    if config.url is not None:
        reports.append(audit_server(config))
    if config.buffer is not None and audit_buffer is not None:
        reports.append(audit_buffer(config))
    for report in reports:
        print("\n".join(report.lines()))
    if config.out:
        write_json(config.out, [report.to_dict() for report in reports])
    return 0 if all(report.verdict == "lossless" for report in reports) else 1


def check(config: AuditConfig) -> None:
    if not config.kernels and config.url is None and config.buffer is None:
        raise UserError(
            "nothing to audit; give --kernels, or --url with the address of a server, or --buffer "
            "with the folder of its records"
        )
    check_limits(config)
    check_file(config.out, "out")
    check_suite(config, ("prompt",))
    if is_given(config) and config.url is None:
        raise UserError("a suite is asked of a server; give --url, too")
    if config.device.partition(":")[0] not in DEVICES or (
        config.device != "cpu" and not torch.cuda.is_available()
    ):
        raise UserError(
            f"device {config.device!r} cannot be used here; give cpu, or cuda where there is a "
            "CUDA device"
        )
    if config.compare_url is not None and config.url is None:
        raise UserError(
            f"compare_url is {config.compare_url!r}, but no server is compared with it; give "
            "--url, too"
        )
