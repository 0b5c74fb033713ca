"""Device, driver and versions, clocks at work, and the rates that bound what only moves bytes."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from scripts.bench.device.report import Report
from scripts.bench.kernels.run import machine
from scripts.bench.kernels.timing import Stopwatch, copy_bandwidth

WARM_S = 2.0


class Machine(NamedTuple):
    device: torch.device
    copy_bytes_s: float  # read and written


def look(report: Report, item: str, device: torch.device) -> Machine:
    """Products until the clocks are up, then a copy and a read of memory."""
    report.note(item, **machine(device), cuda=torch.version.cuda)
    if device.type == "cuda":
        warm(device)
    stopwatch = Stopwatch(device, 0.2)
    copied = copy_bandwidth(stopwatch)
    source = torch.ones((1 << 30) if device.type == "cuda" else (1 << 20), device=device)
    read = 4 * source.numel() / (stopwatch.measure(source.sum).median_ms / 1e3)
    report.note(item, copy_bytes_s=copied, read_bytes_s=read)
    return Machine(device, copied)


def warm(device: torch.device) -> None:
    square, end_s = torch.randn(8192, 8192, device=device).bfloat16(), time.monotonic() + WARM_S
    while time.monotonic() < end_s:
        square @ square
        torch.cuda.synchronize()
