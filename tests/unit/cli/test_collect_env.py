"""`draftsmith collect-env`: lines of a bug report."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftsmith.version import __version__


def test_it_says_what_a_report_needs_and_waits_for_torch_only_at_the_end() -> None:
    code = """
import sys
from draftsmith.commands.collect_env import environment
for name, text in environment():
    print(f"- {name}: {text}")
    assert name == "devices" or "torch" not in sys.modules, name
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    lines = dict(line.removeprefix("- ").split(": ", 1) for line in shown.splitlines())
    assert lines["draftsmith"].startswith(__version__)
    assert f"torch {torch.__version__}" in lines["packages"]
    assert "cores" in lines["processor"]
    assert re.fullmatch(r"[\d.]+ GiB, [\d.]+ GiB of it available", lines["memory"])
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    assert found in lines["devices"]


BROKEN = """
from types import SimpleNamespace
def fail(index):
    raise RuntimeError("no driver\\nmore")
version = SimpleNamespace(cuda="13.0")
cuda = SimpleNamespace(device_count=lambda: 1, get_device_properties=fail)
"""


@pytest.mark.parametrize(
    "torch, said",
    [
        ('raise OSError("libcudart.so.13: no such file\\nmore")',
         "torch cannot be imported (libcudart.so.13: no such file)"),
        (BROKEN, "torch for CUDA 13.0; CUDA fails (no driver)"),
    ],
)  # fmt: skip
def test_a_torch_that_is_broken_is_reported_as_such(torch: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(torch)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import draftsmith.cli as cli; "
    command = [sys.executable, "-c", f"{code}sys.exit(cli.main(['collect-env']))"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.endswith(f"- devices: {said}\n")
