"""The benchmark of pipelines: its table, and settings that the recipes take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftsmith.commands.run import options_of
from draftsmith.train.pipeline import runner
from draftsmith.train.pipeline.recipe import read_recipe
from draftsmith.train.pipeline.stage import resolve
from scripts.bench.recipes.pipelines import FORWARD_KL, PIPELINE, PIPELINES, settings
from scripts.bench.recipes.report import table
from scripts.bench.recipes.run import STAGE, metered_stages

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
