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


def run(checkout: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(checkout / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        command, cwd=checkout, env=environment, text=True, capture_output=True, timeout=60
    )


def test_the_command_says_it_in_one_sentence(checkout: Path) -> None:
    for command in (
        ["-m", "draftsmith.cli", "doctor"],
        ["-c", "import sys; sys.argv[0] = '/bin/draftsmith'; import draftsmith"],
    ):
        done = run(checkout, sys.executable, *command)
        assert done.returncode == 1
        assert done.stderr.startswith("draftsmith: error: ") and done.stderr.count("\n") == 1
        assert "src/draftsmith/distill is a text file in place of a symbolic link" in done.stderr


def test_an_import_says_it(checkout: Path) -> None:
    done = run(checkout, sys.executable, "-c", "import draftsmith")
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1].startswith("ImportError: ")
        and "symbolic link" in done.stderr.splitlines()[-1]
    )


@pytest.mark.parametrize("script", ["test", "quickstart"])
def test_the_scripts_say_it_before_they_install_anything(script: str, checkout: Path) -> None:
    done = run(checkout, "/bin/bash", f"scripts/{script}")
    assert done.returncode == 1 and done.stdout == "" and not (checkout / ".venv").exists()
    assert done.stderr.count("\n") == 1 and "symbolic link" in done.stderr


def test_links_that_are_links_are_no_trouble(checkout: Path) -> None:
    assert (
        run(
            checkout,
            sys.executable,
            "-c",
            f"import sys; sys.path[0] = {str(ROOT / 'src')!r}; import draftsmith",
        ).returncode
        == 0
    )
