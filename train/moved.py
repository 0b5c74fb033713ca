"""A DeepSpeed checkpoint for other processes than those that wrote it, by DeepSpeed's own universal checkpoints.

DeepSpeed keeps an optimizer in as many parts as there were processes. Its converter joins them beside the parts, where a
run that is told `load_universal` finds them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError

# DeepSpeed's name for the file that says which folder holds the joined state.
LATEST = "latest_universal"


def join_parts(checkpoint: Path) -> None:
    """Takes as long as reading and writing the optimizer once; does nothing where it was done before."""
    if (checkpoint / LATEST).is_file():
        return
    parts = checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(parts), "--output_folder", f"{parts}_universal"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        said = done.stdout.strip().splitlines() or ["no word"]
        raise UserError(
            f"checkpoint {str(checkpoint)!r} cannot be joined for another number of processes ({said[-1]}); start as many as "
            "wrote it"
        )


def reads_joined(deepspeed: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed config of a run that goes on from joined parts."""
    return deepspeed | {"checkpoint": {**deepspeed.get("checkpoint", {}), "load_universal": True}}
