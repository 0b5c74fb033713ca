"""The round benchmark as a user starts it, at sizes that say nothing but that it works."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.serve.stats import PHASES
from scripts.paths import ROOT


@pytest.mark.long
def test_every_phase_of_a_round_is_told(tiny_target: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "target").symlink_to(tiny_target("llama"))
    target = Target.load(tmp_path / "target")
    checkpoint.save(Eagle3.create(Eagle3Options(), target, seed=0), tmp_path / "eagle3", target)
    sizes = ("--max-tokens", "8", "--repeats", "1", "--streams", "1", "2", "--k", "2")
    command = [
        sys.executable, "-m", "scripts.bench.serving.round", "--target", str(tmp_path / "target"),
        "--draft", str(tmp_path / "eagle3"), *sizes, "--out", str(tmp_path / "round.json"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "round.json").read_text())["rows"]
    assert {(row["label"], row["temperature"], row["streams"]) for row in rows} == {
        (label, temperature, streams)
        for label in ("no draft", "eagle3")
        for temperature in (0.0, 1.0)
        for streams in (1, 2)
    }
    for row in rows:
        assert (row["draft"] > 0) == (row["label"] == "eagle3")
        assert row["calls"] > 0
        assert sum(row[name] for name in PHASES) < 1.5 * row["round"]
        assert row["tokens"] == 1.0 if row["label"] == "no draft" else row["tokens"] >= 1.0
