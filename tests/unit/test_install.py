"""The requirements resolve as on any machine: from the registry alone, with no local file, no cache
of this machine's and an empty home. `tests/e2e/test_fresh_clone.py` installs them by pip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Most of the time they wait for the registry.
pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]
# How the registry is reached; everything else of pip's and uv's settings is left out.
KEPT = "pip_cert pip_default_timeout ssl_cert_file ssl_cert_dir requests_ca_bundle curl_ca_bundle"
PROJECT = (ROOT / "pyproject.toml").read_text()
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
Run = Callable[..., subprocess.CompletedProcess[str]]


def reaching(environment: dict[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in environment.items()
        if name.lower() in KEPT.split() or name.lower().endswith("_proxy")
    }
    index = environment.get("PIP_INDEX_URL", "")
    return kept | (
        {"PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index} if index.startswith("https://") else {}
    )


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory, install_tools: Callable[..., None]) -> Run:
    """Runs `python -m ...` with nothing of this machine, by the newest uv, which reads metadata
    without whole wheels."""
    home = tmp_path_factory.mktemp("home")
    tools = home / "tools"
    environment = reaching(dict(os.environ)) | {
        "PATH": "/usr/bin:/bin", "HOME": str(home), "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": str(tools),
        "PYTHONDONTWRITEBYTECODE": "1", "UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(home / "cache"),
    }  # fmt: skip

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=580
        )

    install_tools(tools, environment, "uv")
    return run


@pytest.mark.parametrize(
    "index, outcome", [("http://127.0.0.1:9/simple", "skip"), ("file:///nowhere/simple", "fail")]
)
def test_only_a_registry_that_is_not_reached_skips_a_test(
    index: str, outcome: str, install_tools: Callable[..., None], tmp_path: Path
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    reached = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "NO_PROXY": "127.0.0.1"}
    said = "no registry answers" if outcome == "skip" else "uv"
    with pytest.raises(getattr(pytest, outcome).Exception, match=said):
        install_tools(tmp_path / "tools", kept | reached, "uv")


def resolve_by_uv(
    run: Run, constraints: Path, python: str, *options: str
) -> subprocess.CompletedProcess[str]:
    command = "uv pip compile --no-header --no-annotate pyproject.toml --extra dev"
    machine = ("--python-version", python, "--python-platform", "x86_64-manylinux_2_28")
    return run(*command.split(), *machine, "-c", str(constraints), *options)


@pytest.mark.long
def test_a_triton_that_torch_does_not_take_is_refused(stranger: Run, tmp_path: Path) -> None:
    """The constraints as they once were."""
    path, text = tmp_path / "constraints.txt", (ROOT / "constraints.txt").read_text()
    path.write_text(re.sub(r"(?m)^triton==.*$", "triton==3.9.0", text))
    assert path.read_text() != text
    done = resolve_by_uv(stranger, path, "{}.{}".format(*sys.version_info))
    assert done.returncode != 0 and re.search(r"triton\S*( \S+)*==3\.9\.0", done.stderr), (
        done.stderr
    )


@pytest.mark.long
@pytest.mark.parametrize("python", PYTHONS)
def test_every_python_resolves(stranger: Run, python: str) -> None:
    done = resolve_by_uv(stranger, ROOT / "constraints.txt", python)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"torch==2.13.0", "triton==3.7.1"} <= set(done.stdout.splitlines())


@pytest.mark.long
def test_the_oldest_versions_resolve_to_themselves(stranger: Run) -> None:
    """The lowest version that each bound of pyproject.toml allows is the one that
    constraints-oldest.txt names."""
    lowest = ("--resolution", "lowest-direct")
    done = resolve_by_uv(stranger, Path(os.devnull), PYTHONS[0], *lowest)
    assert done.returncode == 0, done.stderr[-2000:]
    oldest = (ROOT / "constraints-oldest.txt").read_text()
    listed = {line.split(";")[0] for line in oldest.splitlines() if not line.startswith("#")}
    assert listed - set(done.stdout.splitlines()) == set()


def test_the_pythons_claimed_are_those_allowed() -> None:
    assert PYTHONS == ["3.10", "3.11", "3.12", "3.13"]
    assert 'requires-python = ">=3.10,<3.14"' in PROJECT
