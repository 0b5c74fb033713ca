"""Runs pipelines and plain trainings of as much CPU time, and compares them. Started by
scripts/bench_recipes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith.cli import main as draftsmith
from draftsmith.files import read_json, write_json
from draftsmith.train.pipeline import runner
from scripts.bench.drafters.figures import Row
from scripts.bench.recipes.pipelines import (
    FORWARD_KL,
    HELD_OUT,
    MAX_LENGTH,
    PIPELINES,
    Evaluated,
    settings,
)
from scripts.bench.recipes.report import table

STAGE = "scripts.bench.recipes.stage"
TARGET = "scripts/quickstart_target"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_recipes", description="Pipelines beside plain forward KL."
    )
    parser.add_argument("--pipelines", nargs="*", default=list(PIPELINES), choices=list(PIPELINES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0.5, help="of CPU time, a training")
    parser.add_argument("--count", type=int, default=512, help="prompts that the target answers")
    parser.add_argument(
        "--work", type=Path, default=Path("runs") / "recipes", help="finished cells are kept here"
    )
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        dest="changes",
        metavar="SETTING=VALUE",
        help="change the pipelines: rows of their own, without another plain training",
    )
    parser.add_argument("--report", action="store_true", help="run nothing, tell what is finished")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    cells = [(name, seed) for seed in range(chosen.seeds) for name in chosen.pipelines]
    if not chosen.report:
        for name, seed in cells:
            finish(name, chosen, seed)
    rows = finished(chosen)
    print(table(rows))
    if chosen.out is not None:
        report = {"schema": 1, "minutes": chosen.minutes, "count": chosen.count, "rows": rows}
        write_json(chosen.out, report)


def finish(name: str, chosen: argparse.Namespace, seed: int) -> None:
    """A cell is measured unless it is kept."""
    label = "".join(f" {change}" for change in chosen.changes).replace("/", "_")
    path = chosen.work / name / f"seed-{seed}{label}.json"
    made_of = {"minutes": chosen.minutes, "count": chosen.count, "seed": seed}
    if not path.exists() or read_json(path, "cell")["made_of"] != made_of:
        write_json(path, {"made_of": made_of, "rows": measure(name, chosen, seed)})


def finished(chosen: argparse.Namespace) -> list[Row]:
    """Rows of the kept cells of this size, those of changed pipelines behind the others."""
    rows: list[Row] = []
    for name in chosen.pipelines:
        paths = sorted((chosen.work / name).glob("seed-*.json"), key=lambda path: len(path.name))
        for cell in (read_json(path, "cell") for path in paths):
            made_of = cell["made_of"]
            of_size = (made_of["minutes"], made_of["count"]) == (chosen.minutes, chosen.count)
            rows += cell["rows"] if of_size and made_of["seed"] < chosen.seeds else []
    return rows


def measure(name: str, chosen: argparse.Namespace, seed: int) -> list[Row]:
    """Rows of a pipeline and of the plain draft. Seeds share the pipeline's folder, so that its
    answers are written once."""
    pipeline, out = PIPELINES[name], chosen.work / name / "run"
    words = settings(pipeline, target=TARGET, minutes=chosen.minutes, count=chosen.count, seed=seed)
    words += chosen.changes
    with metered_stages():
        must(
            draftsmith(
                ["run", f"recipes/pipelines/{name}.yaml", "--out", str(out), "--set", *words]
            )
        )
    shutil.rmtree(out / "replaced", ignore_errors=True)
    parts = [training(out / stage) for stage in pipeline.trained]
    train_s, steps = sum(part[0] for part in parts), sum(part[1] for part in parts)
    plain = chosen.work / name / f"plain-{seed}"
    if not chosen.changes:
        train_plain(name, out, plain, minutes=train_s / 60, seed=seed)
    rows = []
    for one in pipeline.evaluated:
        if chosen.changes and not one.beside:
            continue
        label = ", ".join([one.draft, *chosen.changes])
        rows.append(row(name, one, label, seed, read_json(out / f"{one.stage}.json", "figures")))
        seconds, passed = (train_s, steps) if one.beside else parts[0]
        rows[-1]["trained"] = {"seconds": seconds, "steps": passed}
        if one.beside and not chosen.changes:
            found = evaluate_plain(out, plain, one)
            rows.append(row(name, one, FORWARD_KL, seed, found))
            rows[-1]["trained"] = dict(zip(("seconds", "steps"), training(plain)))
    return rows


def row(name: str, one: Evaluated, draft: str, seed: int, found: dict[str, Any]) -> Row:
    cell = {"part": f"{name}, {one.text}", "name": draft, "seed": seed}
    return {"cell": cell, "evaluations": found["evaluation"]}


@contextmanager
def metered_stages() -> Iterator[None]:
    """Stages run by the module that counts CPU time."""
    before = runner.run_process

    def run_process(
        command: list[str], environment: Mapping[str, str], log: Path, lock: int
    ) -> tuple[int, str]:
        words = [STAGE if word == "draftsmith.cli" else word for word in command]
        return before(words, environment, log, lock)

    runner.run_process = run_process
    try:
        yield
    finally:
        runner.run_process = before


def training(draft: Path) -> tuple[float, int]:
    """(CPU time in s, steps)"""
    record = json.loads((draft / "draftsmith.json").read_text(encoding="utf-8"))["training"]
    return record["elapsed_s"], record["steps"]


def train_plain(name: str, run: Path, out: Path, *, minutes: float, seed: int) -> None:
    pipeline = PIPELINES[name]
    words = [
        "train", pipeline.family, *pipeline.plain, "--target", TARGET, "--data",
        *(run / stage for stage in pipeline.data), "--out", out, "--minutes", minutes,
        "--seed", seed, "--held-out", HELD_OUT, "--max-length", MAX_LENGTH, "--eval-prompts", 0,
        "--no-resume",
    ]  # fmt: skip
    must(subprocess.run([sys.executable, "-m", STAGE, *map(str, words)]).returncode)


def evaluate_plain(run: Path, plain: Path, one: Evaluated) -> dict[str, Any]:
    """Figures by the options of the pipeline's stage."""
    given = json.loads((run / "run.json").read_text(encoding="utf-8"))
    shown = given["stages"][one.stage]["made_of"]["options"]
    out = plain.with_name(f"{plain.name}-{one.stage}.json")
    changed = {"draft": plain, "data": run / shown["data"].strip("${}"), "out": out}
    others = {key: value for key, value in shown.items() if key != "command"}
    words = [f"{key}={value}" for key, value in (others | changed).items()]
    must(subprocess.run([sys.executable, "-m", STAGE, "eval", *words]).returncode)
    return read_json(out, "figures")


def must(status: int) -> None:
    if status != 0:
        sys.exit("bench_recipes: a command failed; its message is above")


if __name__ == "__main__":
    main()
