"""Figures of a CUDA device, in one process, in the order of their worth. Started by
scripts/bench_device."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from scripts.bench.device import real, rounds
from scripts.bench.device.report import Report
from scripts.bench.device.rounds import Machine
from scripts.bench.kernels.timing import Stopwatch, copy_bandwidth
from scripts.bench.machine import machine

WARM_S = 2.0


class Item(NamedTuple):
    seconds: float  # at most; what it leaves is the later ones'
    work: Callable[[], None]


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not (options.tiny or torch.cuda.is_available()):
        return refused("there is no CUDA device; run it on a machine with one, or give --tiny")
    options.out.mkdir(parents=True, exist_ok=True)
    end_s, report = time.monotonic() + options.limit_s, Report(options.out)
    todo = items(report, look(report, torch.device("cpu" if options.tiny else "cuda")), options)
    well = True
    for name in options.items or todo:
        left_s = end_s - time.monotonic()
        print(f"== {name}: {left_s:.0f} s left of all", flush=True)
        if left_s <= 0:
            report.note(name, failed="no time left")
            well = False
            continue
        well &= report.run(name, min(todo[name].seconds, left_s), todo[name].work)
    return 0 if well else 1


def look(report: Report, device: torch.device) -> Machine:
    """Products until the clocks are up, then a copy of memory, whose rate bounds what only moves
    bytes."""
    report.note("machine", **machine(), cuda=torch.version.cuda)
    if device.type == "cuda":
        square, end_s = torch.randn(8192, 8192, device=device).bfloat16(), time.monotonic() + WARM_S
        while time.monotonic() < end_s:
            square @ square
            torch.cuda.synchronize()
    found = Machine(device, copy_bandwidth(Stopwatch(device, 0.2)))
    report.note("machine", copy_bytes_s=found.copy_bytes_s)
    return found


def refused(reason: str) -> int:
    print(f"scripts/bench_device: {reason}", file=sys.stderr)
    return 1


NAMES = ("train", "plain", "eagle3", "published")


def items(report: Report, machine: Machine, options: argparse.Namespace) -> dict[str, Item]:
    """In order."""
    large, small = ("tiny", "tiny") if options.tiny else ("8b", "1b")
    work: dict[str, tuple[float, Callable[[], None]]] = {
        "train": (options.train_s, lambda: real.train(report, "train", options, options.train_s)),
        "plain": (75, lambda: rounds.plain(report, "plain", machine, large)),
        "eagle3": (70, lambda: rounds.drafted(report, "eagle3", machine, large)),
        "published": (
            35,
            lambda: rounds.plain(report, "published", machine, small, rounds.PUBLISHED),
        ),
    }
    return {name: Item(seconds, call) for name, (seconds, call) in work.items()}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench_device", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of device.json and of a trained draft"
    )
    parser.add_argument("--limit-s", type=float, default=560.0, help="seconds of all items")
    parser.add_argument("--items", nargs="+", choices=NAMES, help="only these, in this order")
    parser.add_argument("--model", help="a real model, for train")
    parser.add_argument("--answers", help="its answers, as `draftsmith generate` leaves them")
    parser.add_argument("--train-s", type=float, default=300.0, help="seconds of train")
    parser.add_argument(
        "--tiny", action="store_true", help="rehearse on a CPU, at sizes that say nothing"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
