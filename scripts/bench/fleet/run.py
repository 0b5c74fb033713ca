"""Stages behind scripts/bench_fleet. Each is a module with `add_options(parser)` and
`run(chosen, python) -> dict`, whose values end in the JSON file."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from draftsmith.files import write_json
from scripts.bench.fleet import loop, recording, storm
from scripts.bench.fleet.shipped import shipped_run
from scripts.paths import ROOT

STAGES: dict[str, ModuleType] = {"recording": recording, "loop": loop, "storm": storm}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_fleet", description=__doc__)
    stages = parser.add_subparsers(dest="stage", required=True)
    for name, stage in STAGES.items():
        one = stages.add_parser(name, description=stage.__doc__)
        one.add_argument(
            "--run",
            type=Path,
            default=ROOT / "runs" / "quickstart",
            help="a finished quickstart folder",
        )
        one.add_argument(
            "--shipped", action="store_true", help="take the target and EAGLE-3 draft that ship"
        )
        one.add_argument("--out", type=Path, help="write the figures here as JSON")
        stage.add_options(one)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    python = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
    if not python:
        sys.exit(
            "bench_fleet: DRAFTSMITH_VLLM_PYTHON is not set; give the Python of vLLM's environment"
        )
    if chosen.shipped:
        if chosen.draft != "eagle3":
            sys.exit(f"bench_fleet: --draft {chosen.draft} does not ship; leave out --shipped")
        chosen.run = shipped_run(ROOT / "runs" / "shipped")
    elif not (chosen.run / "export" / "draft-lm").exists():
        print("bench_fleet: no drafts yet, running scripts/quickstart", flush=True)
        subprocess.run([ROOT / "scripts" / "quickstart"], check=True)
    figures = STAGES[chosen.stage].run(chosen, python)
    if chosen.out is not None:
        setting = {
            name: value for name, value in vars(chosen).items() if name not in ("run", "out")
        }
        write_json(
            chosen.out,
            {"schema": 1, "setting": setting, "cores": os.cpu_count(), "figures": figures},
        )
    if broken := figures.get("broken"):
        sys.exit("bench_fleet: " + "; ".join(broken))


if __name__ == "__main__":
    main()
