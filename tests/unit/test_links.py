"""A checkout whose symbolic links became text files, as git makes them where `core.symlinks` is
false."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git writes: each link is a file that holds the path the link would point to."""
    folder = tmp_path_factory.mktemp("checkout")
    package = folder / "src" / "draftsmith"
    package.mkdir(parents=True)
    for path in (ROOT / "src" / "draftsmith").iterdir():
        if path.is_symlink():
            (package / path.name).write_text(str(path.readlink()))
        elif path.is_file():
            shutil.copy(path, package)
    shutil.copytree(
        ROOT / "scripts",
        folder / "scripts",
        ignore=shutil.ignore_patterns("__pycache__", "quickstart_target"),
    )
    return folder


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ((sys.executable, "-m", "draftsmith.cli", "doctor"), "draftsmith: error: "),
        (
            (sys.executable, "-c", "import sys; sys.argv[0] = 'draftsmith'; import draftsmith"),
            "draftsmith: error: ",
        ),
        ((sys.executable, "-c", "import draftsmith"), "ImportError: "),
        (("/bin/bash", "scripts/test"), ""),
        (("/bin/bash", "scripts/quickstart"), ""),
    ],
)
def test_one_sentence_says_it_before_anything_begins(
    words: tuple[str, ...], begins: str, checkout: Path
) -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(checkout / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        words, cwd=checkout, env=environment, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 1 and done.stdout == "" and not (checkout / ".venv").exists()
    *before, said = done.stderr.splitlines()
    assert said.startswith(begins) and "symbolic link" in said
    assert before == [] or begins == "ImportError: "  # a traceback leads to an import
