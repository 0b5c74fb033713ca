"""A clone of the repository with an empty home: `scripts/test` makes its environment and passes, and
the first command of the README answers. That the registry alone has all of it is resolved in
tests/unit/test_install.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# An installation of half a minute where all packages are at hand; room for a slow registry.
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
RUN_S = 1800
# Of the machine: where pip finds packages, where suites lie, and what a CUDA device may need.
KEPT = (
    *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
    *("TORCH_CPU_INDEX", "DRAFTSMITH_SUITES"),
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "home").mkdir()
    command = ["git", "clone", "--quiet", str(ROOT), str(folder / "clone")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder / "clone"


def run(clone: Path, *command: str) -> str:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or name.startswith("PIP_") or name.lower().endswith("_proxy")
    }
    python = Path(sys.base_prefix) / "bin"
    own = {"PATH": f"{python}:/usr/local/bin:/usr/bin:/bin", "HOME": str(clone.parent / "home")}
    done = subprocess.run(
        command, cwd=clone, env=kept | own, text=True, capture_output=True, timeout=RUN_S
    )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


def test_the_checks_make_their_environment_and_pass(clone: Path) -> None:
    printed = run(clone, "scripts/test", "tests/unit/test_errors.py")
    assert "environment: making .venv" in printed and "all checks passed" in printed
    assert "environment: installing" not in run(clone, "scripts/test", "tests/unit/test_errors.py")


def test_the_first_command_of_the_readme_answers(clone: Path) -> None:
    readme = (clone / "README.md").read_text().replace("\\\n", " ")
    command = next(line.split("#")[0] for line in readme.splitlines() if "draftsmith bench" in line)
    printed = run(clone, *f".venv/bin/{command.strip()}".split())
    assert "speculation on / off" in printed
