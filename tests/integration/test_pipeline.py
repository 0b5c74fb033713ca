"""Pipelines of real commands on a tiny target, killed while they train and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import main
from draftsmith.train.pipeline import runner

RECIPE = """
settings: {target: null, prompts: null, steps: 40}
stages:
  - name: data
    command: generate
    options: {target: "${target}", prompts: "${prompts}", max_tokens: 12, chat: never}
  - name: draft
    command: train
    options:
      {family: eagle3, target: "${target}", data: "${data}", steps: "${steps}", batch_size: 2, held_out: 0.25,
       log_every: 1, save_every: 1, eval_prompts: 2, eval_tokens: 8, unroll: {steps: 2}, dtype: float32}
  - name: figures
    command: eval
    options: {target: "${target}", draft: "${draft}", data: "${data}", held_out: 1, prompts: 4, k: 2, max_tokens: 8}
"""


def start(folder: Path, *changes: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "draftsmith.cli", "run", str(folder / "recipe.yaml")]
    command += ["--out", str(folder / "out"), "--set", *changes]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def prompts_in(folder: Path) -> Path:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"text {n}"}) + "\n" for n in range(8)))
    return prompts


def report_of(out: Path) -> str:
    """The report without the padding of its tables."""
    return re.sub(" +", " ", (out / "report.md").read_text())


def in_this_process(command: list[str], *_: Any) -> tuple[int, str]:
    """A stage without the seconds that a process takes to start."""
    return main(command[command.index("draftsmith.cli") + 1 :]), ""


def kill_after_a_checkpoint(out: Path) -> None:
    while not list(out.glob("draft/training/checkpoint-*/complete.json")):
        time.sleep(0.02)
    os.kill(json.loads((out / "run.lock").read_text())["pid"], signal.SIGKILL)


@pytest.mark.long
def test_a_killed_stage_resumes_and_the_rest_is_kept(
    tmp_path: Path,
    tiny_target: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    out, in_a_process = tmp_path / "out", runner.run_process
    command = ["run", str(tmp_path / "recipe.yaml"), "--out", str(out), "--set"]
    command += [f"target={tiny_target('llama')}", f"prompts={prompts_in(tmp_path)}"]
    killer = threading.Thread(target=kill_after_a_checkpoint, args=(out,), daemon=True)

    def train_in_a_process(words: list[str], *others: Any) -> tuple[int, str]:
        if "train" not in words:
            return in_this_process(words)
        killer.start()
        return in_a_process(words, *others)

    monkeypatch.setattr(runner, "run_process", train_in_a_process)
    assert main(command) == 2
    assert "stage 'draft' (train) was killed by signal 9" in capfd.readouterr().err
    assert "| draft | train | ended with status -9 |" in report_of(out)
    metrics = out / "draft" / "metrics.jsonl"
    first = metrics.read_text().splitlines()[0]
    monkeypatch.setattr(runner, "run_process", in_this_process)
    assert main(command) == 0
    shown = capfd.readouterr().out
    assert "[1/3] data: kept" in shown and "[2/3] draft: resumed" in shown
    # Not from the start: the clock's figures of its first step are those of before the kill.
    lines = metrics.read_text().splitlines()
    assert lines[0] == first and json.loads(lines[-1])["step"] == 40
    report = report_of(out)
    for state in ("data | generate | finished", "draft | train | finished, start 2"):
        assert f"| {state} |" in report
    assert report.count("| figures | draft | data |") == 2


@pytest.mark.long
def test_a_killed_pipeline_goes_on_where_it_was(
    tmp_path: Path, tiny_target: Callable[..., str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    changes = (f"target={tiny_target('llama')}", f"prompts={prompts_in(tmp_path)}")
    process = start(tmp_path, *changes)
    deadline_s = time.monotonic() + 600
    while not list(tmp_path.glob("out/draft/training/checkpoint-*/complete.json")):
        assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()[0]
        time.sleep(0.05)
    left = json.loads((tmp_path / "out" / "run.lock").read_text())["pid"]
    os.kill(left, signal.SIGSTOP)
    metrics = tmp_path / "out" / "draft" / "metrics.jsonl"
    first = metrics.read_text().splitlines()[0]
    assert len(metrics.read_text().splitlines()) < 40
    process.kill()
    process.wait()
    # The stage that is left behind would write into the same folder.
    refused = start(tmp_path, *changes)
    words = refused.communicate(timeout=600)[0]
    assert refused.returncode == 2 and f"is in use by another run (process {left} on " in words
    os.kill(left, signal.SIGKILL)
    again = start(tmp_path, *changes)
    words = again.communicate(timeout=1200)[0]
    assert again.returncode == 0, words
    record = json.loads((tmp_path / "out" / "run.json").read_text())["stages"]
    assert {name: one["begun"] for name, one in record.items()} == {
        "data": 1,
        "draft": 2,
        "figures": 1,
    }
    assert "[1/3] data: kept" in words and "[2/3] draft: resumed" in words
    # Not from the start: the clock's figures of its first step are those of before the kill.
    assert metrics.read_text().splitlines()[0] == first
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == 40
    report = report_of(tmp_path / "out")
    assert "| data | generate | finished |" in report and "## Acceptance" in report
    assert report.count("| figures | draft | data |") == 2
