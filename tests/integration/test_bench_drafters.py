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


def test_a_cell_of_an_older_recipe_is_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from scripts.bench.drafters import cells as drafter_cells

    monkeypatch.setattr(drafter_cells, "ROOT", tmp_path)
    (tmp_path / "recipes").mkdir()
    plan = drafter_cells.Plan(
        families=["eagle3"], objectives=["tv"], has_peer=False, seeds=1, minutes=1.0
    )
    told = []
    for text in ("batch_size: 2", "batch_size: 2", "batch_size: 4"):
        (tmp_path / "recipes" / "eagle3-small.yaml").write_text(text)
        told.append([cell.to_dict() for cell in plan.cells()])
    # The draft, and the objective that starts from its recipe.
    assert told[0] == told[1] and len(told[0]) == 2
    assert all(old != new for old, new in zip(told[1], told[2], strict=True))


@pytest.fixture(scope="module")
def report_module() -> Any:
    from scripts.bench.drafters import report as drafter_report

    return drafter_report


@pytest.fixture(scope="module")
def run_folder(tiny_target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the benchmark needs of a quickstart folder: a target and 40 of its sampled answers."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "target").symlink_to(tiny_target("llama"))
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
        assert (
            row["trained"]["steps"] > 0
            and row["trained"]["tokens_per_s"] > 0
            and row["trained"]["seconds"] >= 0.3
        )
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


def row(part: str, name: str, seed: int, tau: float, **trained: float) -> dict[str, Any]:
    evaluation = {"temperature": 1.0, "tau": {"value": tau}, "alpha": [{"value": 0.5}, None]}
    return {
        "cell": {"part": part, "name": name, "seed": seed},
        "trained": {"steps": 10, "passes": 1.0, **trained},
        "evaluations": [evaluation],
    }


def test_ratios_pair_the_seeds_and_a_single_seed_has_no_interval(report_module: Any) -> None:
    rows = [row("families", "eagle3", seed, tau) for seed, tau in enumerate((2.0, 3.0, 4.0))]
    rows += [row("peers", "speculators", seed, tau) for seed, tau in enumerate((1.0, 1.5, 2.0))]
    rows += [row("objectives", "tv", seed, tau) for seed, tau in enumerate((1.9, 3.3, 4.0))]
    told = " ".join(report_module.tables({"k": 2, "rows": rows}).split())
    assert "| speculators | 2.000 +- 0.000 |" in told
    # The seeds' taus differ by far more than their ratios do: 0.95, 1.1 and 1.
    assert "| 1.017 +- 0.190 |" in told
    told = " ".join(report_module.tables({"k": 2, "rows": [*rows[:1], *rows[3:4]]}).split())
    assert "| speculators | 2.000 |" in told
