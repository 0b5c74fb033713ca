"""Pipelines of real commands on a tiny target, killed while they train and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import cli
from tests.waiting import wait_until

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
    command = cli("run", folder / "recipe.yaml", "--out", folder / "out", "--set", *changes)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def report_of(out: Path) -> str:
    """The report without the padding of its tables."""
    return re.sub(" +", " ", (out / "report.md").read_text())


@pytest.mark.long
def test_a_killed_pipeline_goes_on_where_it_was(
    tmp_path: Path, tiny_target: Callable[..., str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"text {n}"}) + "\n" for n in range(8)))
    changes = (f"target={tiny_target('llama')}", f"prompts={prompts}")
    process = start(tmp_path, *changes)
    whole, said = "out/draft/training/checkpoint-*/complete.json", process.communicate
    wait_until(lambda: list(tmp_path.glob(whole)), 600, process=process, said=lambda: said()[0])
    left = json.loads((tmp_path / "out" / "draft" / "train.lock").read_text())["pid"]
    os.kill(left, signal.SIGSTOP)
    metrics = tmp_path / "out" / "draft" / "metrics.jsonl"
    first = metrics.read_text().splitlines()[0]
    assert len(metrics.read_text().splitlines()) < 40
    process.kill()
    process.wait()
    # The stage that is left behind would write into the same folder.
    refused = start(tmp_path, *changes)
    words = refused.communicate(timeout=600)[0]
    assert refused.returncode == 2 and f"is in use by another train (process {left} on " in words
    os.kill(left, signal.SIGKILL)
    again = start(tmp_path, *changes)
    words = again.communicate(timeout=1200)[0]
    assert again.returncode == 0, words
    assert "[1/3] data: kept" in words and "[2/3] draft: resumed" in words
    # Not from the start: the clock's figures of its first step are those of before the kill.
    assert metrics.read_text().splitlines()[0] == first
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == 40
    report = report_of(tmp_path / "out")
    assert "| data | generate | finished |" in report and "## Acceptance" in report
    assert all(f"| figures | {t} | 2 |" in report for t in (0, 1))
