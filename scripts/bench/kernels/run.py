"""Kernel times beside their references, in one run. Started by scripts/bench_kernels."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import sys
import time
import warnings
from typing import Any

import torch

from draftsmith.files import write_json
from scripts.bench.kernels.case import Case, Sizes
from scripts.bench.kernels.cases import FULL, QUICK, all_cases
from scripts.bench.kernels.peers import has_liger
from scripts.bench.kernels.timing import Stopwatch, Timing, copy_bandwidth
from scripts.bench.machine import load, machine

COLUMNS = (
    f"{'':<24}{'median ms':>11}{'80 % of runs':>21}{'peak MiB':>11}{'of copy':>9}{'vs ours':>9}"
)


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    # Graph breaks of torch.compile are not reported here; they show in its time.
    torch._logging.set_logs(dynamo=logging.ERROR)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = chosen_sizes(options)
    stopwatch = Stopwatch(device, options.seconds)
    bandwidth = copy_bandwidth(stopwatch)
    report = {
        "schema": 1,
        "machine": machine(),
        "sizes": dataclasses.asdict(sizes),
        "quick": options.quick,
    }
    report |= {"copy_bytes_s": bandwidth, "cases": []}
    print(
        f"{report['machine']['device']}: copies {bandwidth / 1e9:.1f} GB/s; load "
        f"{report['machine']['load']}"
    )
    if not has_liger(device):
        print("without liger: it is not installed, or there is no CUDA device")
    begun_s = time.monotonic()
    for make in all_cases(sizes, device):
        case = make()
        if not options.cases or any(word in case.name for word in options.cases):
            report["cases"].append(measure(case, stopwatch, bandwidth, compile_too=options.compile))
            print("\n".join(lines(report["cases"][-1])), flush=True)
            if options.out:
                write_json(options.out, report)  # in case that it is stopped
        del case
        gc.collect()
    report["elapsed_s"] = round(time.monotonic() - begun_s, 1)
    report["machine"]["load_at_end"] = load()
    if options.out:
        write_json(options.out, report)
    failed = [
        name
        for case in report["cases"]
        for name, way in case["ways"].items()
        if "failed" in way and name == "ours"
    ]
    return 1 if failed or not report["cases"] else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench_kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="sizes for a CPU")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument(
        "--cases", nargs="+", default=[], help="only cases whose name holds one of these words"
    )
    parser.add_argument(
        "--vocab", nargs="+", type=int, help="vocabulary sizes instead of the usual three"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.5,
        help="spent on the runs of one measurement, at least five runs",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time torch.compile too",
    )
    parser.add_argument("--device", help="cuda, cuda:1, cpu; by default a GPU where there is one")
    return parser


def chosen_sizes(options: argparse.Namespace) -> Sizes:
    sizes = QUICK if options.quick else FULL
    chosen = tuple(options.vocab or ())
    return (
        dataclasses.replace(sizes, vocabularies=chosen, divergence_vocabularies=chosen)
        if chosen
        else sizes
    )


def measure(
    case: Case, stopwatch: Stopwatch, bandwidth: float, *, compile_too: bool
) -> dict[str, Any]:
    floor_ms = 1e3 * case.floor_bytes / bandwidth
    ways = dict(case.ways)
    if compile_too:
        ways |= {
            f"{name} compiled": torch.compile(case.ways[name], dynamic=False)
            for name in case.compiled
        }
    record: dict[str, Any] = {
        "name": case.name, "shape": case.shape, "floor_ms": floor_ms, "ways": {},
    }  # fmt: skip
    for name, call in ways.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                record["ways"][name] = entry(stopwatch.measure(call), floor_ms)
        except Exception as error:
            # One way out of memory, or one peer with another interface, must not cost the rest of
            # the table.
            record["ways"][name] = {
                "failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                    :200
                ]
            }
        if stopwatch.device.type == "cuda":
            torch.cuda.empty_cache()
    torch.compiler.reset()
    return record


def entry(timing: Timing, floor_ms: float) -> dict[str, Any]:
    return timing._asdict() | {"share_of_copy": floor_ms / timing.median_ms if floor_ms else None}


def lines(record: dict[str, Any]) -> list[str]:
    floor = f", floor {record['floor_ms']:.3f} ms" if record["floor_ms"] else ""
    shown = [f"\n{record['name']} ({record['shape']}{floor})", COLUMNS]
    base = record["ways"].get("ours", next(iter(record["ways"].values()))).get("median_ms")
    for name, way in record["ways"].items():
        if "failed" in way:
            shown.append(f"{name:<24} {way['failed']}")
            continue
        spread = f"{way['low_ms']:.3f} .. {way['high_ms']:.3f}"
        share = "" if way["share_of_copy"] is None else f"{way['share_of_copy']:.2f}"
        ratio = "" if base is None else f"{way['median_ms'] / base:.2f}"
        shown.append(
            f"{name:<24}{way['median_ms']:>11.3f}{spread:>21}{way['peak_mib']:>11.1f}{share:>9}{ratio:>9}"
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
