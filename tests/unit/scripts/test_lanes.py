"""Which steps `scripts/test` runs for which arguments, with programs that only write down how they
were called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """#!/usr/bin/env bash
[ "$1" = -c ] && exit 1  # no CUDA device
echo "$(basename "$0") $*" >>"$CALLS"
"""
ENVIRONMENT = """
make_environment() { mkdir -p .venv; }
minutes() { echo "$1 s"; }
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts" / "test")
    (tmp_path / "scripts" / "environment.sh").write_text(ENVIRONMENT)
    for name in ("python", "ruff", "mypy", "mkdocs"):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(PROGRAM)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def calls(checkout: Path, *arguments: str) -> list[str]:
    names = ("DRAFTSMITH_VLLM_PYTHON", "DRAFTSMITH_SPECULATORS_PYTHON", "DRAFTSMITH_CLIENTS")
    environment = os.environ | dict.fromkeys(names, "there") | {
        "DRAFTSMITH_MKDOCS": str(checkout / "bin" / "mkdocs"),
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "CALLS": str(checkout / "calls"),
    }  # fmt: skip
    done = subprocess.run(
        [checkout / "scripts" / "test", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (checkout / "calls").read_text().splitlines()


MUTANTS = "python -m scripts.mutants.check"


@pytest.mark.parametrize(
    "arguments, lanes, mutants",
    [
        ((), ["not long and not gpu"], []),
        (("--all",), ["not long and not gpu", "long and not gpu"], [MUTANTS]),
        (("--mutants",), [], [MUTANTS]),
        (("--mutants", "K1", "S3"), [], [f"{MUTANTS} K1 S3"]),
        (("--all", "--mutants"), ["not long and not gpu", "long and not gpu"], [MUTANTS]),
        (
            ("--mutants", "--all", "K1"),
            ["not long and not gpu", "long and not gpu"],
            [f"{MUTANTS} K1"],
        ),
        (("--all", "tests/unit"), ["not long and not gpu", "long and not gpu"], []),
    ],
)
def test_the_arguments_choose_the_steps(
    arguments: tuple[str, ...], lanes: list[str], mutants: list[str], checkout: Path
) -> None:
    called = calls(checkout, *arguments)
    pytests = [line for line in called if line.startswith("python -m pytest -m")]
    assert len(pytests) == len(lanes)
    assert all(
        line.startswith(f"python -m pytest -m {lane}")
        for line, lane in zip(pytests, lanes, strict=True)
    )
    assert [line for line in called if line.startswith(MUTANTS)] == mutants
    builds = [line for line in called if line.startswith("mkdocs")]
    is_whole = "--all" in arguments and "tests/unit" not in arguments
    assert builds == (["mkdocs build --strict"] if is_whole else [])
    assert all(("tests/unit" in line) == ("tests/unit" in arguments) for line in pytests)
