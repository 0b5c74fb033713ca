"""The source distribution and the wheel: the files in them, and every command as a wheel gives it
that is installed in an empty environment, first with the extra `serve` alone, then with `train`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from draftsmith.commands.table import COMMANDS
from tests.forked import free_port
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
CODE = ("distill", "drafters", "fleet", "kernels", "serve", "train")
# 175 s of CPU, 8 minutes on two busy cores; an hour leaves room for a slow registry.
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
INSTALL_S, RUN_S = 1800, 600
# What the extra `serve` does not bring.
ABSENT = shlex.split("accelerate datasets deepspeed llguidance matplotlib peft pytest")
# Of the machine, for commands of an installed wheel: nothing but what a CUDA device may need.
KEPT = ("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
TEXT = "def draft{}(self, tokens):"
PROMPTS = 24


def tracked(folder: Path) -> None:
    """A copy of what git tracks, with its links; a build leaves its traces there and not in the
    checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def build_wheel(source: Path, out: Path) -> Path:
    command = [sys.executable, *shlex.split("-m pip wheel --quiet --no-deps --wheel-dir")]
    subprocess.run([*command, str(out), str(source)], check=True, capture_output=True, timeout=600)
    return next(out.glob("draftsmith-*.whl"))


def build_sdist(source: Path, out: Path, install_tools: Callable[..., None]) -> Path:
    install_tools(out / "tools", os.environ, "setuptools>=80")
    script = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    environment = {**os.environ, "PYTHONPATH": str(out / "tools")}
    place: Any = {"cwd": source, "env": environment, "check": True, "capture_output": True}
    subprocess.run([sys.executable, "-c", script], timeout=300, **place)
    return next(out.glob("draftsmith-*.tar.gz"))


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory, install_tools: Callable[..., None]
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("built")
    tracked(folder / "checkout")
    sdist = build_sdist(folder / "checkout", folder / "sdist", install_tools)
    return sdist, build_wheel(folder / "checkout", folder / "wheel")


def files_of(wheel: Path) -> dict[str, bytes]:
    """Everything but the list of hashes, whose order is free."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")
        }


def test_the_source_distribution_holds_files_and_builds_the_same_wheel(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        assert [
            member.name
            for member in archive.getmembers()
            if not (member.isfile() or member.isdir())
        ] == []
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
    assert "draftsmith/serve/metrics/dashboard.html" in again and "draftsmith/py.typed" in again
    assert "draftsmith/kernels/attention/paged_cpu.cpp" in again
    assert {
        "draftsmith/recipes/zero2.json",
        "draftsmith/recipes/pipelines/osd.yaml",
    } <= again.keys()


class Installed(NamedTuple):
    """A virtual environment of its own with the wheel in it, and a folder outside the checkout."""

    python: Path
    wheel: Path
    outside: Path

    def draftsmith(self, *arguments: str) -> list[str]:
        return [str(self.python.with_name("draftsmith")), *arguments]

    def places(self) -> dict[str, Any]:
        """Where a command runs: the folder outside, and an environment without this machine's."""
        home = self.outside / "home"
        home.mkdir(exist_ok=True)
        own = {
            "PATH": f"{self.python.parent}:/usr/bin:/bin",
            "HOME": str(home),
            "HF_HUB_OFFLINE": "1",
        }
        plain = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        return {"cwd": self.outside, "env": own | plain | kept}

    def run(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.draftsmith(*arguments),
            text=True,
            capture_output=True,
            timeout=RUN_S,
            **self.places(),
        )
        tails = (done.stdout[-2000:], done.stderr[-2000:])
        assert done.returncode == status and "Traceback" not in done.stderr, (arguments, *tails)
        return done

    def install(self, extra: str) -> None:
        command = [str(self.python), "-m", "pip", "install", "--progress-bar", "off"]
        checked([*command, "-c", str(ROOT / "constraints.txt"), f"{self.wheel}[{extra}]"])

    def packages(self) -> set[str]:
        """Names of the installed distributions."""
        listed = checked([str(self.python), "-m", "pip", "list", "--format", "json"])
        return {one["name"].lower() for one in json.loads(listed.stdout)}


def checked(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs pip with this machine's settings; what lies on PYTHONPATH would count as installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, env=environment, text=True, capture_output=True, timeout=INSTALL_S, **options
    )
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done


@pytest.fixture(scope="module")
def serving(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The build of torch that scripts/environment.sh chooses, and the wheel with `[serve]`."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "outside").mkdir()
    venv.create(folder / "venv", with_pip=True)
    made = Installed(folder / "venv" / "bin" / "python", built[1], folder / "outside")
    assert made.packages() <= {"pip", "setuptools"}
    script = 'source scripts/environment.sh && install_torch "$0" "$(torch_source "$0")"'
    # In the copy: an installer that the choice needs is put beside the environment there.
    checkout = built[1].parent.parent / "checkout"
    checked(["bash", "-c", script, str(made.python)], cwd=checkout)
    made.install("serve")
    return made


@pytest.fixture(scope="module")
def server(
    serving: Installed, launch: Callable[..., Any], tiny_target: Callable[..., str], near_draft: str
) -> Any:
    command = ("serve", "--target", tiny_target("llama"), "--draft", near_draft, "--k", "2")
    recorded = ("--name", "tiny", "--learn", "buffer")
    return launch(serving.draftsmith(*command, *recorded), **serving.places())


@pytest.fixture(scope="module")
def answers(server: Any) -> list[str]:
    """Ids of the answers, which the server records."""
    bodies = [
        {"model": "tiny", "prompt": TEXT.format(number), "max_tokens": 16}
        for number in range(PROMPTS)
    ]
    answered = [
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60) for body in bodies
    ]
    assert {one.status_code for one in answered} == {200}
    assert max(one.json()["usage"]["completion_tokens"] for one in answered) == 16
    return [one.json()["id"] for one in answered]


def test_the_extra_serve_brings_nothing_of_training(serving: Installed) -> None:
    packages = serving.packages()
    assert packages & set(ABSENT) == set() and {"torch", "fastapi", "draftsmith"} <= packages
    code = "import draftsmith; print(draftsmith.__file__)"
    where = subprocess.run(
        [str(serving.python), "-c", code], text=True, capture_output=True, **serving.places()
    )
    assert where.stdout.startswith(str(serving.python.parents[1])), where


def test_every_command_has_its_help(serving: Installed) -> None:
    listed = serving.run("--help").stdout
    for name in COMMANDS:
        assert f"  {name} " in listed
        assert f"usage: draftsmith {name}" in serving.run(name, "--help").stdout


def test_a_server_answers_and_is_judged_audited_and_measured(
    serving: Installed, server: Any, answers: list[str], tmp_path: Path
) -> None:
    url = ("--url", server.url)
    assert ", 0 fail" in serving.run("doctor", *url).stdout
    # Wide as to what may stay unseen, so that few samples do.
    few = ("--contexts", "2", "--samples", "500", "--greedy-tokens", "8", "--bias", "0.24")
    assert "LOSSLESS: every " in serving.run("audit", *url, *few).stdout
    (tmp_path / "prompts.txt").write_text(TEXT)
    short = ("--num-prompts", "2", "--max-tokens", "8", "--repeats", "1")
    done = serving.run("bench", *url, "--prompts", str(tmp_path / "prompts.txt"), *short)
    assert "speculation on / off" in done.stdout
    gone = serving.run("forget", "--buffer", "buffer", "--request", answers[0]).stdout
    assert "records of" in gone and int(gone.split()[0]) > 0


def test_commands_of_training_name_their_extra(serving: Installed) -> None:
    for arguments in (
        ("generate", "--target", "t", "--prompts", "p", "--out", "o"),
        ("train", "eagle3", "--target", "t", "--data", "d", "--out", "o"),
        ("eval", "--target", "t", "--draft", "d", "--data", "d"),
        ("distill", "--target", "t", "--draft", "d", "--buffer", "b", "--versions", "v"),
    ):
        done = serving.run(*arguments, status=2)
        assert "pip install 'draftsmith[train]'" in done.stderr


def test_commands_without_an_extra_run_without_training(
    serving: Installed, tiny_target: Callable[..., str], near_draft: str
) -> None:
    target = ("--target", tiny_target("llama"))
    assert ", 0 fail" in serving.run("doctor", *target, "--draft", near_draft).stdout
    serving.run("export", near_draft, "--to", "vllm", *target, "--out", "exported")
    assert (serving.outside / "exported" / "config.json").is_file()
    planned = serving.run("plan", *target, "--families", "eagle3")
    assert "| eagle3 " in planned.stdout and "draftsmith train eagle3" in planned.stdout
    assert "plan: 6/6 passes" in planned.stderr


@pytest.fixture(scope="module")
def training(serving: Installed) -> Installed:
    """The same environment with `[train]` too; what runs after it no longer sees
    `[serve]` alone."""
    serving.install("train")
    assert {"accelerate", "datasets", "deepspeed", "matplotlib", "peft"} <= serving.packages()
    return serving


def test_a_draft_is_made_trained_judged_and_exported(
    training: Installed, tiny_target: Callable[..., str]
) -> None:
    outside, target = training.outside, ("--target", tiny_target("llama"))
    (outside / "prompts.txt").write_text(
        "\n".join(TEXT.format(number) for number in range(PROMPTS))
    )
    training.run(
        "generate", *target, "--prompts", "prompts.txt", "--max-tokens", "24", "--out", "data"
    )
    assert (outside / "data" / "provenance.json").is_file()
    steps = ("--steps", "3", "--eval-every", "0")
    training.run("train", "eagle3", *target, "--data", "data", "--out", "draft", *steps)
    assert (outside / "draft" / "model.safetensors").is_file()
    assert (outside / "draft" / "curves.png").is_file()
    pair = (*target, "--draft", "draft")
    assert "alpha_1" in training.run("eval", *pair, "--data", "data").stdout
    assert ", 0 fail" in training.run("doctor", *pair, "--data", "data").stdout
    training.run("export", "draft", "--to", "vllm", "--out", "export")
    assert (outside / "export" / "config.json").is_file()


def test_a_learner_learns_from_what_the_server_recorded(
    training: Installed, answers: list[str], tiny_target: Callable[..., str], near_draft: str
) -> None:
    pair = ("--target", tiny_target("llama"), "--draft", near_draft)
    folders = ("--buffer", "buffer", "--versions", "versions")
    ends = ("--max-updates", "1", "--until-idle-s", "60")
    done = training.run("distill", *pair, *folders, *ends)
    assert "stopped after update 1" in done.stdout + done.stderr
    status = json.loads((training.outside / "versions" / "status.json").read_text())
    assert status["version"] == 1
    shown = training.run("fleet", "status", "--versions", "versions").stdout
    assert shown.startswith("version 1 is live")


def test_a_proxy_records_what_passes_through_it(serving: Installed, server: Any) -> None:
    address = f"127.0.0.1:{free_port()}"
    command = ("observe", "--url", server.url, "--buffer", "seen", "--listen", address)
    proxy = subprocess.Popen(serving.draftsmith(*command), **serving.places())
    try:
        wait_for(f"http://{address}/health", proxy, lambda: None, timeout_s=RUN_S)
        body = {"model": "tiny", "prompt": TEXT, "max_tokens": 8, "return_token_ids": True}
        answer = httpx.post(f"http://{address}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
    finally:
        proxy.send_signal(signal.SIGTERM)
        assert proxy.wait(timeout=RUN_S) == 0
    assert list((serving.outside / "seen").rglob("*.parquet")) != []
