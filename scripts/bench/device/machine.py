"""Devices, driver and versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

import torch

from draftsmith.files import write_json
from scripts.bench.device.shapes import device_of, stage_parser
from scripts.bench.kernels.run import machine

QUERY = "name,driver_version,memory.total"


def main(arguments: list[str] | None = None) -> int:
    options = stage_parser("machine", __doc__).parse_args(arguments)
    report: dict[str, Any] = {"schema": 1, **machine(device_of(options)), "devices": devices()}
    report |= {"cuda": torch.version.cuda, "driver": driver()}
    write_json(options.out, report)
    for name, value in report.items():
        print(f"{name}: {value}")
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
