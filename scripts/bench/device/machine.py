"""Device, driver and versions, clocks at work, and the rates that bound what only moves bytes."""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import Any, NamedTuple

import torch

from scripts.bench.device.report import Report
from scripts.bench.kernels.run import machine
from scripts.bench.kernels.timing import Stopwatch, copy_bandwidth

QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem"
WARM_S = 2.0


class Machine(NamedTuple):
    device: torch.device
    copy_bytes_s: float  # read and written


def look(report: Report, item: str, device: torch.device) -> Machine:
    """Products until the clocks are up, then a copy and a read of memory."""
    report.note(item, **machine(device), cuda=torch.version.cuda, devices=devices())
    if device.type == "cuda":
        warm(device)
    stopwatch = Stopwatch(device, 0.2)
    copied = copy_bandwidth(stopwatch)
    source = torch.ones((1 << 30) if device.type == "cuda" else (1 << 20), device=device)
    read = 4 * source.numel() / (stopwatch.measure(source.sum).median_ms / 1e3)
    report.note(item, copy_bytes_s=copied, read_bytes_s=read, driver=driver())
    return Machine(device, copied)


def warm(device: torch.device) -> None:
    square, end_s = torch.randn(8192, 8192, device=device).bfloat16(), time.monotonic() + WARM_S
    while time.monotonic() < end_s:
        square @ square
        torch.cuda.synchronize()


def devices() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


def driver() -> list[str]:
    """A line for each device from the driver's own tool; none where there is no such tool."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
