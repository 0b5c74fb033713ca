"""The part of the tree that the device benchmark needs, for the way to a borrowed machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from scripts.paths import ROOT

MOST_BYTES = 5 << 20
LEFT_OUT = ("tests/", "docs/", "scripts/quickstart_target/", "scripts/quickstart_draft/")


def pack(folder: Path) -> str:
    """Copy the files of the working tree that travel into `folder`; a sentence of what did and what
    did not. Raises `ValueError` where they are more than `MOST_BYTES`."""
    travel, stay = split(present())
    total = num_bytes(travel)
    if total > MOST_BYTES:
        raise ValueError(f"{total} bytes would travel, {MOST_BYTES} may; leave more out")
    for name in travel:
        to = folder / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to, follow_symlinks=False)
    mib = f"{total / 2**20:.1f} MiB in {len(travel)} files, without {', '.join(LEFT_OUT)}"
    return f"{folder}: {mib} ({num_bytes(stay) / 2**20:.1f} MiB)"


def present() -> list[str]:
    """Files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = listed.stdout.decode().split("\0")
    return [name for name in names if name and (ROOT / name).is_symlink() | (ROOT / name).exists()]


def split(names: list[str]) -> tuple[list[str], list[str]]:
    stay = [name for name in names if name.startswith(LEFT_OUT)]
    return [name for name in names if not name.startswith(LEFT_OUT)], stay


def num_bytes(names: list[str]) -> int:
    return sum((ROOT / name).lstat().st_size for name in names)
