"""The draft benchmark as a user starts it, at sizes that say nothing but that it works; and what
its report makes of figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.drafters.target.target import Target
from tests import forked
from tests.data_folders import rows_of, sampled_from, write_rows

TINY = (
    "--minutes", "0.005", "--seeds", "1", "--families", "eagle3", "--objectives", "tvd++",
)  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(target_folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the benchmark needs of a quickstart folder: a target and 40 of its sampled answers."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "target").symlink_to(target_folder)
    target = Target.load(folder / "target")
    prompts = [[3 + number, 5, 7] for number in range(40)]
    answers = target.answer(prompts, max_new_tokens=12, temperature=1.0, batch_size=40)
    rows = rows_of(prompts, answers, held_out=range(4))
    write_rows(folder / "data", rows, sampled_from(target))
    return folder


@pytest.fixture
def bench(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], tuple[str, dict[str, Any]]]:
    """`bench(out)` -> output and report of a benchmark whose trainings run in forked processes."""
    from scripts.bench.drafters import run as drafter_run

    monkeypatch.delenv("DRAFTSMITH_SPECULATORS_PYTHON", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(drafter_run, "subprocess", SimpleNamespace(run=forked.run))

    def started(out: Path) -> tuple[str, dict[str, Any]]:
        places = ["--run", run_folder, "--work", out.parent / "work", "--out", out]
        monkeypatch.setattr(sys, "argv", ["bench_drafters", *map(str, places), *TINY])
        drafter_run.main()
        written = capsys.readouterr()
        return " ".join((written.out + written.err).split()), json.loads(
            out.read_text(encoding="utf-8")
        )

    return started


@pytest.mark.long
def test_cells_are_trained_evaluated_told_and_kept(
    bench: Callable[[Path], tuple[str, dict[str, Any]]], tmp_path: Path
) -> None:
    told, report = bench(tmp_path / "drafters.json")
    assert [row["cell"]["name"] for row in report["rows"]] == ["eagle3", "tvd++"]
    for row in report["rows"]:
        assert row["trained"]["steps"] > 0 and row["trained"]["tokens_per_s"] > 0
        assert row["trained"]["seconds"] >= 0.3
        assert [one["temperature"] for one in row["evaluations"]] == [0.0, 1.0]
        assert all(
            1 <= one["tau"]["value"] <= 1 + report["k"] and one["tokens"] > 0
            for one in row["evaluations"]
        )
    assert "| eagle3 |" in told and told.count("| tvd++ |") == 1 and "without speculators" in told
    kept = (tmp_path / "work" / "families" / "eagle3" / "seed-0" / "cell.json").stat().st_mtime_ns
    _, again = bench(tmp_path / "drafters.json")
    assert again["rows"] == report["rows"]
    assert (
        tmp_path / "work" / "families" / "eagle3" / "seed-0" / "cell.json"
    ).stat().st_mtime_ns == kept
