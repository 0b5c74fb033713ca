"""Machine of a measurement, as its figures name it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

from draftsmith import files

PACKAGES = ("torch", "transformers", "triton", "liger-kernel")


def machine() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    threads = torch.get_num_threads()
    return {"device": files.machine(), "threads": threads, "load": load(), "versions": versions}


def load() -> str:
    """Load of the last minute, which separates a quiet machine from a shared one."""
    return f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
