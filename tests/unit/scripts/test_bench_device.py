"""The device benchmark on a machine without a device: every stage's code runs, at sizes that say
nothing; a stage that fails stops no other."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench.device import commands, gpu_tests, run
from scripts.bench.device.run import STAGES, Stage, main, parser, run_stage
from scripts.paths import ROOT
from tests import forked


def report(folder: Path, stage: str) -> dict[str, Any]:
    return dict(json.loads((folder / f"{stage}.json").read_text(encoding="utf-8")))


SHORT = [name for name in STAGES if name != "commands"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_training_is_started_in_every_way_that_needs_no_device(tmp_path: Path) -> None:
    options = parser().parse_args(["--out", str(tmp_path), "--dry-run"])
    assert run_stage("commands", tmp_path, options, 800.0) == ""
    found = report(tmp_path, "commands")
    assert found["data"]["seconds"] > 0
    left_out = [name for name, way in found["ways"].items() if "left out" in way]
    assert left_out == ["layers from the host"]
    ended = {name: way for name, way in found["ways"].items() if name not in left_out}
    assert len(ended) == 8 and all("seconds" in way for way in ended.values()), ended


def test_a_command_that_fails_is_told_by_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert commands.ended("train") == {"failed": ""}
    two = commands.WAYS["target in two shares"]
    assert commands.tried(two, tmp_path, tmp_path, devices=1) == {"left out": "needs 2 devices"}


@pytest.mark.parametrize("devices, processes", [(0, 2), (1, 1), (2, 2), (8, 2)])
def test_zero_takes_the_devices_that_there_are(
    devices: int, processes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(commands, "ended", lambda *given, processes: asked.append(processes))
    for name in ("ZeRO-3", "one process"):
        commands.tried(commands.WAYS[name], tmp_path, tmp_path, devices)
    assert asked == [processes, None]


@pytest.mark.parametrize("failed, status", [("zero2.json", 1), ("nothing", 0)])
def test_one_way_that_fails_fails_the_stage(
    failed: str, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(
        commands,
        "ended",
        lambda *given, **_: {"failed": ""} if failed in str(given) else {"seconds": 1.0},
    )
    assert commands.main(["--out", str(tmp_path / "commands.json"), "--dry-run"]) == status
    assert report(tmp_path, "commands")["ways"].keys() == commands.WAYS.keys()


def test_every_stage_runs_without_a_device(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "scripts.bench.device.run",
        "--out",
        str(tmp_path),
        "--dry-run",
        "--stages",
        *SHORT,
    ]
    done = forked.run(command, capture_output=True, timeout=300, cwd=ROOT)
    logs = "".join(path.read_text(encoding="utf-8")[-1500:] for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, (done.stdout, logs)
    assert f"'torch': '{torch.__version__}'" in str(done.stdout)
    reports = {name: report(tmp_path, name) for name in SHORT}
    assert all(one["schema"] == 1 and "failed" not in one for one in reports.values())
    assert reports["machine"]["versions"]["torch"] == torch.__version__
    assert reports["tests"]["skipped"] > 0 and not reports["tests"]["failed_tests"]
    steps = {case["name"]: case["ways"] for case in reports["kernels"]["cases"]}
    for name in ("sum and norm step", "gate step", "rotation and write step"):
        assert steps[name]["ours"]["runs"] >= 5, steps[name]
    for way in reports["serving"]["ways"].values():
        assert way["T=1, 2 streams"]["ms_a_round"] > 0 and way["T=0, 1 streams"]["tokens_s"] > 0
        assert way["T=0, 1 streams"]["of_reading"] > 0
    assert set(reports["pair"]["same_greedy_answers"].values()) == {1.0}
    assert {row["engine"] for row in reports["pair"]["rows"]} == {"no draft", "k = 3", "k auto"}
    for name in ("training", "training_without_flex", "dflash", "learner", "two_processes"):
        assert reports["training"][name]["tokens_s_a_process"] > 0


def test_the_files_of_device_tests_are_found() -> None:
    files = gpu_tests.files_with_mark(ROOT / "tests")
    assert str(ROOT / gpu_tests.ONE_FILE) in files and len(files) >= 10
    assert not any("distill" in file for file in files)


def test_without_a_device_it_refuses_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "there is no CUDA device" in capsys.readouterr().err and not os.listdir(tmp_path)


def test_a_stage_that_fails_or_takes_too_long_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = dict.fromkeys(("machine", "tests", "serving"), Stage("timeit", 1.0))
    commands = {
        "machine": [sys.executable, "-c", "raise SystemExit(3)"],
        "tests": [sys.executable, "-c", "pass"],
        "serving": [sys.executable, "-c", "import time; time.sleep(60)"],
    }
    monkeypatch.setattr(run, "STAGES", stages)
    monkeypatch.setattr(run, "command_of", lambda name, *given: commands[name])
    arguments = ["--out", str(tmp_path), "--dry-run", "--limit-s", "2"]
    assert main([*arguments, "--stages", *stages]) == 1
    found = {name: report(tmp_path, name)["failed"] for name in stages}
    assert found["machine"] == "ended with status 3" and found["tests"] == "left no figures"
    assert found["serving"].startswith("stopped after")
    options = parser().parse_args(arguments)
    assert run_stage("machine", tmp_path, options, 0.0) == "no time left"


def test_what_a_stage_has_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grandchild holds a lock as long as it runs."""
    held = tmp_path / "held"
    holding = (
        f"import fcntl, time; file = open({str(held)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "file.write('held'); file.flush(); time.sleep(60)"
    )
    starting = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holding!r}])"
    monkeypatch.setattr(run, "command_of", lambda *given: [sys.executable, "-c", starting])
    options = parser().parse_args(["--out", str(tmp_path), "--dry-run"])
    assert run_stage("tests", tmp_path, options, 3.0) == "stopped after 3 s"
    with open(held) as file:
        assert file.read() == "held"
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_stage_that_never_began_has_no_log(tmp_path: Path) -> None:
    (tmp_path / "machine.log").write_text("of another run", encoding="utf-8")
    arguments = ["--out", str(tmp_path), "--dry-run", "--limit-s", "0", "--stages", "machine"]
    assert main(arguments) == 1
    assert report(tmp_path, "machine")["failed"] == "no time left"
    assert not (tmp_path / "machine.log").exists()
