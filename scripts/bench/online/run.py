"""Learning from traffic, measured stream by stream. Started by scripts/bench_online."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith import files
from draftsmith.files import read_json, write_json, write_text
from draftsmith.progress import Progress
from scripts.bench.machine import machine
from scripts.bench.online import cell
from scripts.bench.online.domains import PROMPT_TOKENS
from scripts.bench.online.report import draw, tables
from scripts.bench.online.setting import Setting, open_setting
from scripts.bench.online.streams import STREAMS
from scripts.bench.online.world import BATCH, SAMPLING, K
from scripts.paths import ROOT


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_online", description="Learning from traffic, measured."
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "runs" / "online",
        help="target, drafts and finished streams are kept here",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="write table (.md), figures (.json) and picture (.png) beside each other here",
    )
    parser.add_argument("--only", nargs="*", default=list(STREAMS), choices=tuple(STREAMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--requests",
        type=int,
        default=2000,
        help="after a sudden shift; everything else is a share of it",
    )
    parser.add_argument(
        "--target-minutes", type=float, default=9.0, help="training time of the target, once"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    chosen = options(arguments)
    torch.set_num_threads(1)
    setting = open_setting(chosen.work, target_minutes=chosen.target_minutes)
    cells = [
        {"stream": name, "seed": seed, "requests": chosen.requests}
        for seed in range(chosen.seeds)
        for name in chosen.only
    ]
    measure(setting, cells)
    rows = [row for one in cells if (row := finished(setting, one)) is not None]
    text = f"{conditions(chosen.requests, len(rows))}\n\n{tables(rows)}"
    print(text)
    if chosen.out is not None and rows:
        write_text(chosen.out.with_suffix(".md"), text + "\n")
        write_json(
            chosen.out.with_suffix(".json"), {"schema": 1, "machine": machine(), "rows": rows}
        )
        draw(chosen.out.with_suffix(".png"), rows)


def measure(setting: Setting, cells: list[dict[str, Any]]) -> None:
    waiting = [one for one in cells if finished(setting, one) is None]
    progress = Progress("bench_online", total=len(waiting), unit="streams")
    try:
        for done, one in enumerate(waiting, start=1):
            result = cell.run(setting, one["stream"], one["requests"], one["seed"])
            row = {"cell": one, "result": result, "load": os.getloadavg()[0]}
            write_json(path_of(setting, one), row)
            progress.update(done, f"{one['stream']}, seed {one['seed']}")
    except KeyboardInterrupt:
        print("bench_online: interrupted; the same command goes on", file=sys.stderr)
    progress.close()


def path_of(setting: Setting, one: dict[str, Any]) -> Path:
    return setting.work / f"seed-{one['seed']}" / "streams" / f"{one['stream']}.json"


def finished(setting: Setting, one: dict[str, Any]) -> dict[str, Any] | None:
    """Row of a stream; None where it was measured with other arguments, or not at all."""
    path = path_of(setting, one)
    row = read_json(path, "stream") if path.exists() else None
    return row if row is not None and row["cell"] == one else None


def conditions(requests: int, count: int) -> str:
    return (
        f"{requests} requests after the shift of {PROMPT_TOKENS} + {SAMPLING.max_tokens} tokens at "
        f"T = {SAMPLING.temperature:g}, batch {BATCH}, EAGLE-3 with k = {K}, {count} streams "
        f"finished; {files.machine()}, one thread. Intervals are 95 %, over seeds."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
