"""The source distribution and the wheel: the files in them, and the commands as an installed wheel gives them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
CODE = ("distill", "drafters", "kernels", "serve", "train")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def tracked(folder: Path) -> None:
    """A copy of what git tracks, with its links; a build leaves its traces there and not in the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def build_wheel(source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return next(out.glob("draftsmith-*.whl"))


def build_sdist(source: Path, out: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(out / "tools"), "setuptools>=80"], check=True
    )
    script = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    environment = {**os.environ, "PYTHONPATH": str(out / "tools")}
    subprocess.run([sys.executable, "-c", script], cwd=source, env=environment, check=True, capture_output=True, timeout=300)
    return next(out.glob("draftsmith-*.tar.gz"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("built")
    tracked(folder / "checkout")
    return build_sdist(folder / "checkout", folder / "sdist"), build_wheel(folder / "checkout", folder / "wheel")


def files_of(wheel: Path) -> dict[str, bytes]:
    """Everything but the list of hashes, whose order is free."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


def test_the_source_distribution_holds_files_and_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        assert [member.name for member in archive.getmembers() if not (member.isfile() or member.isdir())] == []
        archive.extractall(tmp_path)
    unpacked = next(tmp_path.glob("draftsmith-*"))
    for folder in CODE:
        there = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py")}
        assert there == {
            path.relative_to(unpacked / "src" / "draftsmith" / folder)
            for path in (unpacked / "src" / "draftsmith" / folder).rglob("*.py")
        }
    again = files_of(build_wheel(unpacked, tmp_path / "again"))
    assert again == files_of(wheel)
    assert "draftsmith/serve/dashboard.html" in again and "draftsmith/py.typed" in again


@pytest.fixture(scope="module")
def run(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run(command, ...)` from an empty folder, in an environment with the wheel, and with this one's requirements."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False)
    binary = folder / "venv" / "bin"
    site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    command = [sys.executable, "-m", "pip", "--python", str(binary / "python"), "install", "--quiet", "--no-deps", str(built[1])]
    # A path to the checkout would count as installed.
    subprocess.run(command, env={**os.environ, "PYTHONPATH": ""}, check=True, timeout=300)
    # The checkout's editable install is a .pth file or a finder, which a path from another environment does not run.
    own = [path for path in sys.path if path.endswith("site-packages")]
    (site / "requirements.pth").write_text("\n".join(own) + "\n")
    empty = folder / "empty"
    empty.mkdir()

    def started(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{binary}:/usr/bin:/bin", "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [str(binary / name), *arguments], cwd=empty, env=environment, text=True, capture_output=True, timeout=600
        )

    where = started("python", "-c", "import draftsmith; print(draftsmith.__file__)")
    assert where.stdout.startswith(str(site)), where
    return started


def test_every_command_has_its_help(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    for name in COMMANDS:
        done = run("draftsmith", name, "--help")
        assert done.returncode == 0 and f"usage: draftsmith {name}" in done.stdout, done.stderr
