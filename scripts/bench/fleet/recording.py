"""Cost of recording: one vLLM without settings, the same again, and one that records, over the same
prompts in turns, every other turn backwards. A pair is two passes of one turn; "again" shows how
far two servers that do the same differ here."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from draftsmith.serve.bench.prompts import read_prompts
from scripts.bench.fleet.installed import variables
from scripts.bench.serving.peers import vllm_server
from scripts.bench.serving.systems import Load, Served, Workload, awake
from scripts.demo.traffic import write_bench_prompts

OFF, AGAIN, ON = "off", "off, again", "recording"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", default="eagle3", choices=("eagle3", "draft-lm"))
    parser.add_argument("--k", type=int, default=3, help="draft tokens per round")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="2 pairs of 4 prompts of 16 tokens")


def run(chosen: argparse.Namespace, python: str) -> dict[str, Any]:
    if chosen.quick:
        chosen.pairs, chosen.prompts, chosen.max_tokens, chosen.streams = 2, 4, 16, 2
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        systems = servers(stack, chosen, python, folder)
        load = Load(prompts_of(chosen, folder), chosen.max_tokens, chosen.k, chosen.prompts)
        speeds = measure(systems, load, chosen)
        figures = summary(speeds) | records_of(systems[ON], folder / "buffer")
    report(figures, chosen)
    return figures


def servers(
    stack: ExitStack, chosen: argparse.Namespace, python: str, folder: Path
) -> dict[str, Served]:
    method = "eagle3" if chosen.draft == "eagle3" else "draft_model"
    speculative = {
        "method": method,
        "model": str(chosen.run / "export" / chosen.draft),
        "num_speculative_tokens": chosen.k,
    }
    settings = {
        "buffer": str(folder / "buffer"),
        "version": "1",
        "admin": True,
        "mend_expand_kernel": True,
    }
    # The same kernel in all: only the recorder differs.
    plain = {"mend_expand_kernel": True}
    found = {}
    for name, given in ((OFF, plain), (AGAIN, plain), (ON, settings)):
        url, group = stack.enter_context(
            vllm_server(
                python,
                chosen.run / "target",
                [
                    *("--speculative-config", json.dumps(speculative)),
                    *("--additional-config", json.dumps({"draftsmith": given})),
                ],
                variables=variables(folder / "installed"),
            )
        )
        found[name] = Served(name, url, group=group)
    return found


def prompts_of(chosen: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    path = folder / "prompts.jsonl"
    write_bench_prompts(chosen.run / "target", path, chosen.prompts)
    return read_prompts(str(path), count=chosen.prompts, chars=400, seed=0)


def measure(
    systems: dict[str, Served], load: Load, chosen: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens per second of each system in each turn."""
    work = Workload(chosen.temperature, chosen.streams, 0)
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    for system in systems.values():
        system.run(load, work)  # warm, and every prompt once
    for turn in range(chosen.pairs):
        names = list(systems) if turn % 2 == 0 else list(reversed(systems))
        for name in names:
            found = systems[name].run(load, work)
            speeds[name].append(found.num_tokens / found.wall_s)
            print(f"turn {turn + 1}: {name} {speeds[name][-1]:.1f} tok/s", flush=True)
    return speeds


def summary(speeds: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {
        name: [one / off for one, off in zip(speeds[name], speeds[OFF])] for name in (AGAIN, ON)
    }
    return {
        "tokens_per_s": speeds,
        "ratios": ratios,
        "median_ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "load_average": os.getloadavg(),
    }


def records_of(system: Served, buffer: Path) -> dict[str, Any]:
    """Figures of the recorder itself, and the bytes of a drafted position on disk."""
    with awake(system.group):
        found = httpx.get(f"{system.url}/draftsmith/status", timeout=60).json()["workers"][0]
    records = found["records"]
    positions = sum(one["positions"] for one in records["writer"]["versions"].values())
    size = sum(path.stat().st_size for path in buffer.glob("*.parquet"))
    return {
        "recorder": records,
        "bytes_per_reached_position": size / max(1, positions),
    }


def report(figures: dict[str, Any], chosen: argparse.Namespace) -> None:
    print(f"\n{chosen.pairs} pairs, {chosen.streams} streams, T = {chosen.temperature:g}")
    for name, values in figures["ratios"].items():
        print(
            f"{name} / {OFF}: median {statistics.median(values):.3f}, "
            f"from {min(values):.3f} to {max(values):.3f}"
        )
    recorder = figures["recorder"]
    print(
        f"engine thread's share of a step: {recorder['engine_thread_share']:.2%}; "
        f"{figures['bytes_per_reached_position']:.0f} bytes per verified position; "
        f"{recorder['dropped_requests']} of {recorder['requests']} requests dropped, "
        f"{recorder['text_only_steps']} steps text only"
    )
    for version, one in recorder["writer"]["versions"].items():
        print(
            f"version {version}: alpha {one['alpha']:.3f}, tau {one['tau']:.3f}, z {one['z']:.2f}"
        )
    print(f"load average of the machine {figures['load_average'][0]:.1f}")
