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

from scripts.bench.device import gpu_tests, learning, parts, real, rounds
from scripts.bench.device.machine import Machine, look
from scripts.bench.device.pack import pack
from scripts.bench.device.report import Report

LARGE = "8B"  # that a real model is padded to


class Item(NamedTuple):
    seconds: float  # at most; what it leaves is the later ones'
    work: Callable[[], None]


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.pack is not None:
        print(pack(options.pack))
        return 0
    if options.out is None:
        return refused("give --out DIR, or --pack DIR")
    if not (options.tiny or torch.cuda.is_available()):
        return refused("there is no CUDA device; run it on a machine with one, or give --tiny")
    options.out.mkdir(parents=True, exist_ok=True)
    end_s, report = time.monotonic() + options.limit_s, Report(options.out)
    machine = look(report, "machine", torch.device("cpu" if options.tiny else "cuda"))
    todo = items(report, machine, options)
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


def refused(reason: str) -> int:
    print(f"scripts/bench_device: {reason}", file=sys.stderr)
    return 1


NAMES = (
    "train", "pair", "plain", "eagle3", "published", "pair-large", "kernels", "products",
    "divergences", "learning", "tests",
)  # fmt: skip


def items(report: Report, machine: Machine, options: argparse.Namespace) -> dict[str, Item]:
    """In order. A draft of the real model that is still short of its goal has the time first."""
    large, small = ("tiny", "tiny") if options.tiny else ("8b", "1b")
    padded = "8M" if options.tiny else LARGE
    work: dict[str, tuple[float, Callable[[], None]]] = {
        "train": (options.train_s, lambda: real.train(report, "train", options, options.train_s)),
        "pair": (80, lambda: real.pair(report, "pair", machine, options, None)),
        "plain": (75, lambda: rounds.plain(report, "plain", machine, large)),
        "eagle3": (70, lambda: rounds.drafted(report, "eagle3", machine, large)),
        "published": (35, lambda: rounds.published(report, "published", machine, small)),
        "pair-large": (60, lambda: real.pair(report, "pair-large", machine, options, padded)),
        "kernels": (30, lambda: parts.kernels(report, "kernels", machine)),
        "products": (20, lambda: parts.products(report, "products", machine)),
        "divergences": (25, lambda: parts.divergences(report, "divergences", machine)),
        "learning": (40, lambda: learning.steps(report, "learning", machine, small)),
        "tests": (600, lambda: gpu_tests.run(report, "tests", options.out, options.tiny)),
    }
    return {name: Item(seconds, call) for name, (seconds, call) in work.items()}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench_device", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of device.json and of a trained draft")
    parser.add_argument("--pack", type=Path, help="copy what has to travel into this folder")
    parser.add_argument("--limit-s", type=float, default=560.0, help="seconds of all items")
    parser.add_argument("--items", nargs="+", choices=NAMES, help="only these, in this order")
    parser.add_argument("--model", help="a real model, for train, pair and pair-large")
    parser.add_argument("--draft", help="its draft; without one, that which train leaves")
    parser.add_argument("--answers", help="its answers, as `draftsmith generate` leaves them")
    parser.add_argument("--train-s", type=float, default=300.0, help="seconds of train")
    parser.add_argument("--prompts", default="stdlib:prose", help="of pair and pair-large")
    parser.add_argument(
        "--tiny", action="store_true", help="rehearse on a CPU, at sizes that say nothing"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
