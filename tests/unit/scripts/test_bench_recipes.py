"""The benchmark of pipelines: its table, and settings that the recipes take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from draftsmith.commands.run import options_of
from draftsmith.files import write_json
from draftsmith.train.pipeline import runner
from draftsmith.train.pipeline.recipe import read_recipe, resolve
from scripts.bench.recipes import run
from scripts.bench.recipes.pipelines import FORWARD_KL, PIPELINE, PIPELINES, settings
from scripts.bench.recipes.report import table
from scripts.bench.recipes.run import STAGE, finished, metered_stages

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", PIPELINES)
def test_the_recipes_take_the_settings(name: str, tmp_path: Path) -> None:
    pipeline = PIPELINES[name]
    words = settings(pipeline, target="T", minutes=1.5, count=7, seed=3)
    recipe = read_recipe(ROOT / "recipes" / "pipelines" / f"{name}.yaml", words)
    stages = {one.name: one for one in resolve(recipe, tmp_path, options_of)}
    trained = [stages[stage].options for stage in pipeline.trained]
    assert sum(one["minutes"] for one in trained) == pytest.approx(1.5)
    assert all(one["seed"] == 3 for one in trained)
    assert {stages[stage].command for stage in pipeline.trained} == {"train"}
    assert all(stages[stage].options["count"] == 7 for stage in (*pipeline.counts, *pipeline.data))
    for one in pipeline.evaluated:
        held_out = stages[one.stage].options["held_out"]
        # What a draft is evaluated on, no draft was trained on.
        assert held_out == (trained[0]["held_out"] if one.text == "code" else 1)


def test_the_table_pairs_the_seeds() -> None:
    def row(name: str, seed: int, value: float, mbsu: float | None) -> dict[str, Any]:
        found = [
            {"temperature": t, "tau": {"value": value + t}, "alpha": [{"value": 0.5}], "mbsu": mbsu}
            for t in (0.0, 1.0)
        ]
        cell = {"part": "p, code", "name": name, "seed": seed}
        return {"cell": cell, "evaluations": found, "trained": {"seconds": 30.0, "steps": 9}}

    rows = [row(PIPELINE, 0, 2.0, 1.5), row(FORWARD_KL, 0, 1.0, None)]
    assert table(rows).splitlines()[2:] == [
        "| p, code | pipeline | 1 | 30 | 9 | 2.000 | 3.000 | 0.500 | 0.500 | 1.50 | 1.50 | 2.000 | 1.500 |",
        "| p, code | forward KL | 1 | 30 | 9 | 1.000 | 2.000 | 0.500 | 0.500 | - | - | 1 | 1 |",
    ]
    rows += [row(PIPELINE, 1, 4.0, 1.5), row(FORWARD_KL, 1, 2.0, None)]
    assert "| 2.000 +- 0.000 |" in table(rows).splitlines()[2]


def test_cells_of_this_size_are_told_changed_ones_behind(tmp_path: Path) -> None:
    def write(name: str, minutes: float, seed: int) -> None:
        cell = {"made_of": {"minutes": minutes, "count": 7, "seed": seed}, "rows": [{"of": name}]}
        write_json(tmp_path / "eagle3-8b" / f"{name}.json", cell)

    write("seed-0", 0.5, 0)
    write("seed-0 draft.optim.lr=1", 0.5, 0)
    write("seed-1", 0.5, 1)
    write("seed-2", 0.5, 2)
    write("seed-0 draft.seed=9", 1.0, 0)
    chosen = argparse.Namespace(
        work=tmp_path, pipelines=["mtp-qwen3", "eagle3-8b"], seeds=2, minutes=0.5, count=7
    )
    found = [row["of"] for row in finished(chosen)]
    assert found == ["seed-0", "seed-1", "seed-0 draft.optim.lr=1"]


def test_a_changed_pipeline_has_rows_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plain training is that of the pipeline as it is."""
    figures = {"evaluation": [{"temperature": 0.0}]}

    def draftsmith(words: list[str]) -> int:
        assert words[-1] == "align.divergence=forward-kl"
        for one in PIPELINES["direct-alignment"].evaluated:
            write_json(tmp_path / "direct-alignment" / "run" / f"{one.stage}.json", figures)
        return 0

    monkeypatch.setattr(run, "draftsmith", draftsmith)
    monkeypatch.setattr(run, "training", lambda draft: (15.0, 7))
    monkeypatch.setattr(run, "train_plain", None)
    chosen = argparse.Namespace(
        work=tmp_path, minutes=0.5, count=7, changes=["align.divergence=forward-kl"]
    )
    run.finish("direct-alignment", chosen, 1)
    chosen.pipelines, chosen.seeds = ["direct-alignment"], 3
    rows = finished(chosen)
    assert [row["cell"]["name"] for row in rows] == ["pipeline, align.divergence=forward-kl"] * 2
    assert all(row["trained"] == {"seconds": 30.0, "steps": 14} for row in rows)


def test_stages_count_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run_process(command: list[str], *_: Any) -> tuple[int, str]:
        started.append(command)
        return 0, ""

    monkeypatch.setattr(runner, "run_process", run_process)
    with metered_stages():
        runner.run_process(["torchrun", "-m", "draftsmith.cli", "train"], {}, Path("log"), 0)
    assert started == [["torchrun", "-m", STAGE, "train"]]
    assert runner.run_process is run_process
