"""A run folder of the target and the EAGLE-3 draft that ship, in the layout of a finished
quickstart, made in seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.demo.ship_draft import SHIPPED_DRAFT
from scripts.demo.stages import SHIPPED_TARGET, unpack


def shipped_run(folder: Path) -> Path:
    """`folder` with `target`, `eagle3` and `export/eagle3`, which stay once they are there."""
    if not (folder / "eagle3").exists():  # the last of the two
        unpack(SHIPPED_TARGET, folder / "target")
        (folder / "eagle3").symlink_to(SHIPPED_DRAFT)
    out = folder / "export" / "eagle3"
    if not out.exists():
        command = [sys.executable, "-m", "draftsmith.cli", "export", str(folder / "eagle3")]
        command += ["--to", "vllm", "--target", str(folder / "target"), "--out", str(out)]
        subprocess.run(command, check=True)
    return folder
