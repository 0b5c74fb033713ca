"""Stages of the device benchmark, each a process of its own with a share of the time. Started by
scripts/bench_device."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.files import write_json
from scripts.bench.device.shapes import TARGETS
from scripts.paths import ROOT


class Stage(NamedTuple):
    """`share`: of the whole time, at most; what it leaves is the later ones'."""

    module: str
    share: float


STAGES = {
    "machine": Stage("scripts.bench.device.machine", 0.1),
    "tests": Stage("scripts.bench.device.gpu_tests", 0.35),
    "kernels": Stage("scripts.bench.kernels.run", 0.4),
    "serving": Stage("scripts.bench.device.serving", 0.6),
    "pair": Stage("scripts.bench.device.pair", 0.6),
    "training": Stage("scripts.bench.device.training", 0.9),
    "commands": Stage("scripts.bench.device.commands", 1.0),
}
GRACE_S = 10.0  # between a signal to end and one that cannot be ignored
TINY_KERNELS = (
    "--device", "cpu", "--quick", "--vocab", "64", "--seconds", "0", "--no-compile",
    "--cases", "chain", "step",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not (options.dry_run or torch.cuda.is_available()):
        print(
            "scripts/bench_device: there is no CUDA device; run it on a machine with one, or give "
            "--dry-run",
            file=sys.stderr,
        )
        return 1
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    end_s, failed = time.monotonic() + options.limit_s, []
    for name in options.stages:
        most_s = min(end_s - time.monotonic(), STAGES[name].share * options.limit_s)
        reason = run_stage(name, folder, options, most_s)
        log = _log(folder, name)
        if name == "machine" and log.exists():
            print(log.read_text(encoding="utf-8"), end="")
        print(f"{name}: {reason or 'done'}, {end_s - time.monotonic():.0f} s left", flush=True)
        failed += [name] if reason else []
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench_device", description=__doc__)
    parser.add_argument("--out", required=True, help="folder of the stages' JSON files and logs")
    parser.add_argument("--limit-s", type=float, default=1500.0, help="seconds of all stages")
    parser.add_argument("--size", choices=TARGETS, default="1b", help="shape of the target")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    return parser


def run_stage(name: str, folder: Path, options: argparse.Namespace, most_s: float) -> str:
    """Run a stage into `folder`/NAME.json and NAME.log; why it failed, "" where it did not."""
    out, begun_s = folder / f"{name}.json", time.monotonic()
    out.unlink(missing_ok=True)
    _log(folder, name).unlink(missing_ok=True)
    if most_s <= 0:
        return _failed(out, "no time left")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    if options.dry_run:
        environment["TRITON_INTERPRET"] = "1"
    with open(_log(folder, name), "w", encoding="utf-8") as log:
        stage = subprocess.Popen(
            command_of(name, out, options),
            stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            status = stage.wait(most_s)
        except subprocess.TimeoutExpired:
            return _failed(out, f"stopped after {most_s:.0f} s")
        finally:
            end_group(stage)
    if status:
        return _failed(out, f"ended with status {status}")
    if not out.exists():
        return _failed(out, "left no figures")
    report = json.loads(out.read_text(encoding="utf-8"))
    write_json(out, {**report, "seconds": round(time.monotonic() - begun_s, 1)})
    return ""


def end_group(stage: subprocess.Popen[bytes]) -> None:
    """End whatever is left of a stage and of what it has started. A launcher gets a while to end
    processes that are in sessions of their own, as torchrun's are."""
    end_s = time.monotonic() + GRACE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(stage.pid, number)
            while time.monotonic() < end_s:
                stage.poll()
                os.killpg(stage.pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            break
    stage.wait()


def command_of(name: str, out: Path, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", STAGES[name].module, "--out", str(out)]
    if name == "kernels":
        return [*command, *(TINY_KERNELS if options.dry_run else ())]
    return [
        *command,
        "--size",
        "tiny" if options.dry_run else options.size,
        *(["--dry-run"] if options.dry_run else []),
    ]


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def _failed(out: Path, reason: str) -> str:
    """Note the failure beside the figures that the stage has left."""
    report: dict[str, Any] = {}
    if out.exists():
        report = json.loads(out.read_text(encoding="utf-8"))
    write_json(out, {"schema": 1, **report, "failed": reason})
    return reason


if __name__ == "__main__":
    sys.exit(main())
