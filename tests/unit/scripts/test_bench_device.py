"""The device benchmark on a machine without a device: every item's code runs, at sizes that say
nothing; an item that fails or takes too long stops no other and loses nothing."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench.device.report import Report
from scripts.bench.device.run import NAMES, main
from scripts.paths import ROOT
from tests import forked

TARGET = ROOT / "scripts" / "quickstart_target"


def figures(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "device.json").read_text(encoding="utf-8"))["items"])


def started(*words: object) -> Any:
    command = [sys.executable, "-m", "scripts.bench.device.run", *map(str, words)]
    return forked.run(command, capture_output=True, timeout=800, cwd=ROOT)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_item_is_rehearsed_without_a_device(tmp_path: Path) -> None:
    answers, out = tmp_path / "answers", tmp_path / "out"
    words = ("--target", TARGET, "--prompts", "stdlib:code", "--count", 32, "--prompt-tokens", 24)
    command = [sys.executable, "-m", "draftsmith.cli", "generate", *map(str, words)]
    made = forked.run([*command, "--max-tokens", "16", "--out", str(answers)], timeout=300)
    assert made.returncode == 0
    done = started("--out", out, "--tiny", "--model", TARGET, "--answers", answers)
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    found = figures(out)
    assert list(found) == ["machine", *NAMES]
    assert not [name for name, one in found.items() if "failed" in one]
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert found["machine"]["copy_bytes_s"] > 0
    assert [one["temperature"] for one in found["train"]["evaluation"]] == [0.0, 1.0]
    for name in ("plain", "eagle3"):
        load = found[name]["T=1, 8 streams"]
        assert load["ms"] > 0 and load["phases_ms"]["verify"] > 0 and found[name]["reading_ms"] > 0
    nothing, given = found["eagle3"]["T=0, 1 streams"], found["eagle3"]["tau 3, T=0, 1 streams"]
    assert given["tokens_s"] * given["ms"] > nothing["tokens_s"] * nothing["ms"]


@pytest.mark.long
def test_an_item_that_takes_too_long_keeps_its_figures_and_stops_no_other(tmp_path: Path) -> None:
    report, begun_s = Report(tmp_path), time.monotonic()

    def endless() -> None:
        report.note("slow", first=1)
        while True:
            try:  # as an engine does, which drops a draft that raises
                time.sleep(30)
            except Exception:
                continue

    assert not report.run("slow", 0.3, endless)
    assert time.monotonic() - begun_s < 20
    assert not report.run("broken", 5, lambda: [].pop())
    assert report.run("good", 5, lambda: report.note("good", value=2.0))
    found = figures(tmp_path)
    assert found["slow"]["first"] == 1 and found["slow"]["failed"] == "stopped after 0 s"
    assert found["broken"]["failed"] == "IndexError: pop from empty list"
    assert found["good"]["value"] == 2.0 and "failed" not in found["good"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_machine_without_a_device_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "there is no CUDA device" in capsys.readouterr().err and not list(tmp_path.iterdir())
