"""`draftsmith collect-env`: lines of a bug report."""

from __future__ import annotations

import subprocess
import sys

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
    assert "cores" in lines["processor"] and "GiB" in lines["memory"]
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    assert found in lines["devices"]
