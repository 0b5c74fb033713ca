"""Learning from traffic, measured cell by cell. Started by scripts/bench_online."""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.files import read_json, write_json, write_text
from draftsmith.progress import Progress
from scripts.bench.online.bounds import run_bounds
from scripts.bench.online.cells import (
    BOUNDS,
    CAPTURE,
    CHANGES,
    COST,
    GATE,
    NAMES,
    OBJECTIVES,
    PARTS,
    POOLS,
    REQUESTS,
    RETURNS,
    SYSTEM,
    VARIANTS_PART,
    Cell,
    plan,
)
from scripts.bench.online.changes import run_changes
from scripts.bench.online.cost import run_cost
from scripts.bench.online.curves import run_baselines, run_curve
from scripts.bench.online.domains import PROMPT_TOKENS
from scripts.bench.online.faults import run_gate
from scripts.bench.online.objectives import run_objectives
from scripts.bench.online.pools import run_pools
from scripts.bench.online.report import draw, summary, tables
from scripts.bench.online.returns import run_returns
from scripts.bench.online.setting import Setting, open_setting
from scripts.bench.online.system import run_capture, run_system
from scripts.bench.online.variants import run_variant
from scripts.bench.online.world import BATCH, SAMPLING, K
from scripts.paths import ROOT

RUN: dict[str, Callable[[Setting, Cell], dict[str, Any]]] = {
    "baselines": run_baselines,
    "curves": run_curve,
    GATE: run_gate,
    OBJECTIVES: run_objectives,
    SYSTEM: run_system,
    CAPTURE: run_capture,
    COST: run_cost,
    POOLS: run_pools,
    BOUNDS: run_bounds,
    CHANGES: run_changes,
    RETURNS: run_returns,
    VARIANTS_PART: run_variant,
}


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_online", description="Learning from traffic, measured."
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "runs" / "online",
        help="target, drafts and finished cells are kept here",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="write table (.md), figures (.json) and picture (.png) beside each other here",
    )
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=NAMES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--requests",
        type=int,
        default=REQUESTS,
        help="after a sudden shift; everything else is a share of it",
    )
    parser.add_argument(
        "--report", action="store_true", help="measure nothing, tell what is finished"
    )
    parser.add_argument(
        "--target-minutes", type=float, default=9.0, help="training time of the target, once"
    )
    parser.add_argument(
        "--parameters",
        help="serve and learn with the trained target padded to so many (scripts/pad_target), "
        "for example 100M",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    chosen = options(arguments)
    torch.set_num_threads(1)
    setting = open_setting(
        chosen.work, target_minutes=chosen.target_minutes, parameters=chosen.parameters
    )
    cells = list(plan(seeds=chosen.seeds, requests=chosen.requests, only=chosen.only))
    if not chosen.report:
        measure(setting, cells)
    rows = [row for cell in cells if (row := finished(setting, cell)) is not None]
    report = {
        "schema": 1,
        "requests": chosen.requests,
        "parameters": chosen.parameters,
        "machine": machine(),
        "rows": rows,
    }
    text = f"{conditions(report)}\n\n{tables(report)}"
    print(text)
    if chosen.out is not None:
        write_text(chosen.out.with_suffix(".md"), text + "\n")
        write_json(chosen.out.with_suffix(".json"), summary(report))
        draw(chosen.out.with_suffix(".png"), report)


def measure(setting: Setting, cells: list[Cell]) -> None:
    waiting = [cell for cell in cells if finished(setting, cell) is None]
    progress = Progress("bench_online", total=len(waiting), unit="cells", stream=sys.stderr)
    try:
        for done, cell in enumerate(waiting, start=1):
            attempt(setting, cell)
            progress.update(done, cell.folder)
    except KeyboardInterrupt:
        print(
            "bench_online: interrupted; this is what is finished, the same command goes on",
            file=sys.stderr,
        )
    progress.close()


def attempt(setting: Setting, cell: Cell) -> None:
    """Run a cell. One that fails is reported, left out and tried again by the next start, so that
    the other cells are kept."""
    try:
        write_json(path_of(setting, cell), run(setting, cell))
    except (Exception, SystemExit):  # a server that did not start ends with the latter
        print(f"bench_online: {cell.folder} failed", file=sys.stderr)
        traceback.print_exc()


def run(setting: Setting, cell: Cell) -> dict[str, Any]:
    begun = time.monotonic(), time.process_time()
    result = RUN[cell.part](setting, cell)
    wall_s, cpu_s = time.monotonic() - begun[0], time.process_time() - begun[1]
    return {
        "cell": cell.to_dict(),
        "result": result,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "load": os.getloadavg()[0],
    }


def path_of(setting: Setting, cell: Cell) -> Path:
    return setting.cells / f"{cell.folder}.json"


def finished(setting: Setting, cell: Cell) -> dict[str, Any] | None:
    """Row of a cell; None where it was measured with other arguments, or not at all."""
    row = read_json(path_of(setting, cell), "cell") if path_of(setting, cell).exists() else None
    return row if row is not None and row["cell"] == cell.to_dict() else None


def conditions(report: dict[str, Any]) -> str:
    loads = [row["load"] for row in report["rows"]] or [math.nan]
    padded = f", target padded to {report['parameters']}" if report["parameters"] else ""
    return (
        f"{report['requests']} requests after the shift of {PROMPT_TOKENS} + "
        f"{SAMPLING.max_tokens} tokens at T = "
        f"{SAMPLING.temperature:g}, batch {BATCH}, EAGLE-3 with k = {K}{padded}, "
        f"{len(report['rows'])} "
        "cells finished; one thread, load "
        f"average {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores. Intervals are "
        "95 %, over seeds."
    )


def machine() -> dict[str, Any]:
    return {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
