"""`draftsmith collect-env`: what a bug report needs, in lines that Markdown shows as a list."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from draftsmith.errors import first_line
from draftsmith.progress import loading
from draftsmith.version import __version__

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "accelerate", "datasets", "peft"),
    *("deepspeed", "triton", "numpy", "pyarrow", "fastapi", "uvicorn", "httpx", "vllm"),
)
# Instruction sets of x86 and Arm that decide which kernels run.
SETS = re.compile(r"avx\w*|amx\w*|fma|f16c|asimd\w*|sve\w*|bf16|i8mm")


@dataclass(frozen=True, kw_only=True)
class CollectEnvConfig:
    """No options."""


def run(config: CollectEnvConfig) -> int:
    for name, text in environment():
        print(f"- {name}: {text}", flush=True)
    return 0


def environment() -> Iterator[tuple[str, str]]:
    """Name and text of each line. What torch is asked comes last, since its import takes
    seconds."""
    from draftsmith.files import cache_folder

    yield "draftsmith", f"{__version__}{commit()}"
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "packages", ", ".join(f"{name} {version_of(name)}" for name in PACKAGES)
    yield "processor", processor()
    yield "memory", memory()
    yield "cache folder", str(cache_folder())
    with loading():
        found = devices()
    yield "devices", found


def commit() -> str:
    """Commit of the checkout that runs, and whether it was changed; "" for an installed wheel."""
    source = Path(__file__).resolve().parents[3]
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--exclude=*"]
    if not (source / ".git").exists():
        return ""
    try:
        return f", commit {subprocess.check_output(command, text=True, timeout=10).strip()}"
    except (OSError, subprocess.SubprocessError):
        return ""


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def table_of(path: str) -> dict[str, str]:
    """Values by name of a file of the kernel, the last of each name; {} without the file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError:
        lines = []
    return dict(re.split(r"\s*: *", line, maxsplit=1) for line in lines if ":" in line)


def memory() -> str:
    """Whole memory, and what programs could still take of it, the files that it caches included."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = table_of("/proc/meminfo").get("MemAvailable")
    left = f"{int(available.split()[0]) / 2**20:.1f} GiB" if available else "unknown how much"
    return f"{total / 2**30:.1f} GiB, {left} of it available"


def processor() -> str:
    known = table_of("/proc/cpuinfo")
    name = known.get("model name") or platform.processor() or platform.machine()
    flags = (known.get("flags") or known.get("Features") or "").split()
    sets = " ".join(flag for flag in flags if SETS.fullmatch(flag)) or "instruction sets unknown"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {os.cpu_count()} cores, {usable} of them usable; {sets}"


def devices() -> str:
    try:
        import torch
    except (ImportError, OSError) as error:  # the latter of a library that it loads
        return f"torch cannot be imported ({first_line(error)})"
    built = f"torch for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU'}"
    try:
        found = [
            f"{one.name}, {one.total_memory / 2**30:.0f} GiB, capability {one.major}.{one.minor}"
            for one in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ]
    except RuntimeError as error:
        found = [f"CUDA fails ({first_line(error)})"]
    return "; ".join([built, *(found or ["no CUDA device"])])
