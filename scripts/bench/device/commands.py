"""`draftsmith train` as a user starts it, a few steps on the quickstart's target in each way that spreads
or saves memory: ZeRO, a target in shares, layers that are read for every pass, activations computed
again. Which ways end well is the result; how fast a real model would be is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.files import write_json
from scripts.bench.device.shapes import stage_parser
from scripts.paths import ROOT

TARGET = ROOT / "scripts" / "quickstart_target"
LIMIT_S = 180.0  # of each command


class Way(NamedTuple):
    """`processes` of a launcher, where each has a device of its own; `fewest` of them where there
    are fewer."""

    arguments: tuple[str, ...] = ()
    processes: int | None = None
    fewest: int = 1
    needs_device: bool = False


WAYS = {
    "one process": Way(),
    "activations computed again": Way(("--gradient-checkpointing",)),
    **{
        f"ZeRO-{stage}": Way(("--deepspeed", str(ROOT / f"recipes/zero{stage}.json")), 2)
        for stage in (1, 2, 3)
    },
    "target in two shares": Way(("--target-shares", "2"), 2, 2),
    "two shares, ZeRO-3": Way(
        ("--target-shares", "2", "--deepspeed", str(ROOT / "recipes/zero3.json")), 2, 2
    ),
    "layers from the host": Way(("--target-offload", "cpu"), needs_device=True),
    "layers from the disk": Way(("--target-offload", "disk")),
}


def main(arguments: list[str] | None = None) -> int:
    parser = stage_parser("commands", __doc__)
    options = parser.parse_args(arguments)
    devices = 0 if options.dry_run else torch.cuda.device_count()
    if options.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the commands
    report: dict[str, Any] = {"schema": 1, "devices": devices, "ways": {}}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        report["data"] = ended(
            "generate", "--target", TARGET, "--prompts", "stdlib:code", "--count", "32",
            "--prompt-tokens", "32", "--max-tokens", "32", "--out", data,
        )  # fmt: skip
        for number, (name, way) in enumerate(WAYS.items()):
            report["ways"][name] = tried(way, data, Path(folder) / str(number), devices)
            print(name, report["ways"][name], flush=True)
            write_json(options.out, report)
    return int(any("failed" in one for one in (report["data"], *report["ways"].values())))


def tried(way: Way, data: Path, out: Path, devices: int) -> dict[str, Any]:
    if devices and way.fewest > devices:
        return {"left out": f"needs {way.fewest} devices"}
    if way.needs_device and not devices:
        return {"left out": "needs a device"}
    processes = way.processes
    if processes and devices:
        processes = min(processes, devices)
    return ended(
        "train", "eagle3", "--target", TARGET, "--data", data, "--out", out,
        "--steps", "4", "--batch-size", "2", "--log-every", "2", "--eval-prompts", "0",
        *way.arguments, processes=processes,
    )  # fmt: skip


def ended(*arguments: object, processes: int | None = None) -> dict[str, Any]:
    """{"seconds"} of a command that ended well, and {"failed"}, its last words, of another.
    `processes` of a launcher; None: without one."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m"]
    command = [sys.executable, "-m", *(launcher if processes else ()), "draftsmith.cli"]
    begun_s = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
            env=os.environ | {"TRITON_INTERPRET": "0"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {LIMIT_S:g} s"}
    if done.returncode:
        return {"failed": done.stdout[-500:]}
    return {"seconds": round(time.monotonic() - begun_s, 1)}


if __name__ == "__main__":
    sys.exit(main())
