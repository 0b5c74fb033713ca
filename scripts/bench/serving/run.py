"""The comparison behind scripts/bench_serving: systems that are all up at once take turns over the
same prompts."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from draftsmith import files
from draftsmith.drafters.layouts.gguf import model_folder
from draftsmith.files import write_json
from draftsmith.progress import Progress
from draftsmith.serve.bench.client import read_prompts
from draftsmith.serve.bench.command import started
from scripts.bench.machine import machine
from scripts.bench.serving.peers import Bench, llama_systems, vllm_systems
from scripts.bench.serving.report import table
from scripts.bench.serving.systems import TIMEOUT_S, Pass, Served, System, Workload
from scripts.demo.shipped import in_dtype


def our_systems(stack: ExitStack, bench: Bench) -> Iterator[System]:
    draft = ["--draft", str(bench.draft)]
    # An answer that an earlier pass gave is no draft.
    suffix = ["--suffix", "--suffix-max-cached-requests", "0"]
    options = {
        "no draft": [],
        "suffix": suffix,
        "draft": draft,
        "draft behind suffix": [*draft, *suffix],
        "draft, k auto": [*draft, "--k", "auto"],
    }
    for name, words in options.items():
        if bench.wants(f"draftsmith, {name}"):
            k = [] if "--k" in words else ["--k", str(bench.k)]
            arguments = ["--target", str(bench.target), "--dtype", bench.dtype, *k, *words]
            url = stack.enter_context(started(arguments, timeout_s=TIMEOUT_S))
            yield Served(f"draftsmith, {name}", url)


def systems_of(stack: ExitStack, bench: Bench) -> list[System]:
    """All systems asked for, started."""
    found: list[System] = []
    if python := os.environ.get("DRAFTSMITH_VLLM_PYTHON"):
        found += vllm_systems(stack, bench, python)
    if bench.draft and (program := os.environ.get("DRAFTSMITH_LLAMA_SERVER")):
        found += llama_systems(stack, bench, program)
    found += our_systems(stack, bench)
    if not found:
        sys.exit(f"bench_serving: --only {bench.wanted.pattern!r} matches no system")
    return found


def measure(
    systems: Sequence[System], works: Sequence[Workload], repeats: int
) -> list[dict[str, Any]]:
    """Every system once a turn, every other turn backwards, so that a drift of the machine favours
    none."""
    rows = []
    total = len(works) * repeats * len(systems)
    progress = Progress("bench_serving", total, unit="passes")
    done = 0
    for work in works:
        passes: dict[str, list[Pass]] = {system.name: [] for system in systems}
        for system in systems:
            system.run(work._replace(prompts=work.prompts[:1], max_tokens=8))
        for repeat in range(repeats):
            for system in systems if repeat % 2 == 0 else reversed(systems):
                passes[system.name].append(system.run(work))
                done += 1
                progress.update(done, f"{system.name}, T = {work.temperature:g}")
        rows += [figures(system, work, passes[system.name]) for system in systems]
    progress.close()
    return rows


def figures(system: System, work: Workload, passes: list[Pass]) -> dict[str, Any]:
    speeds = [one.num_tokens / one.wall_s for one in passes]
    drafts, accepted = sum(one.drafts for one in passes), sum(one.accepted for one in passes)
    return {
        "system": system.name, "temperature": work.temperature, "streams": work.streams,
        "tokens_per_s": statistics.median(speeds), "passes": speeds,
        "tau": 1 + accepted / drafts if drafts else None,
        # Later passes repeat the prompts, which caches of prefixes then hold.
        "first_token_s": passes[0].first_token_s,
        "biased": work.temperature > 0 and system.biased_when_sampled,
    }  # fmt: skip


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_serving", description="Serving speed beside vLLM and llama.cpp."
    )
    parser.add_argument("--target", default="demo", help="a folder, a GGUF file or `demo`")
    parser.add_argument("--draft", type=Path, help="EAGLE-3; without it no system has one")
    parser.add_argument("--prompts", default="stdlib:code", help="as of `draftsmith bench`")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--k", type=int, default=3, help="draft tokens per round, for all systems")
    parser.add_argument("--count", type=int, default=6, help="prompts, four a stream at least")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--only", type=re.compile, default=re.compile(""), help="systems whose name matches"
    )
    return parser.parse_args()


def compare(chosen: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    target = Path(model_folder(chosen.target))
    bench = Bench(
        target=in_dtype(target, folder / "target", chosen.dtype),
        draft=chosen.draft, exports=folder / "exports", dtype=chosen.dtype, k=chosen.k,
        streams=max(chosen.streams), wanted=chosen.only,
    )  # fmt: skip
    works = []
    for temperature in chosen.temperature:
        for streams in chosen.streams:
            # Drafts make answers of one length end at different times: with fewer than four a
            # stream, the last ones alone would be timed.
            count = max(chosen.count, 4 * streams if streams > 1 else 1)
            prompts = read_prompts(chosen.prompts, count=count, chars=400, seed=0)
            works.append(Workload(prompts, chosen.max_tokens, temperature, streams))
    with ExitStack() as stack:
        return measure(systems_of(stack, bench), works, chosen.repeats)


def main() -> None:
    chosen = options()
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(chosen, Path(folder))
    print(f"{files.machine()}, {chosen.dtype}, k = {chosen.k}\n{table(rows)}")
    for peer, variable in (("vLLM", "VLLM_PYTHON"), ("llama.cpp", "LLAMA_SERVER")):
        if f"DRAFTSMITH_{variable}" not in os.environ:
            print(f"{peer} was not measured: DRAFTSMITH_{variable} is not set")
    if chosen.draft is None:
        print("no draft was measured, and nothing of llama.cpp: --draft is not given")
    if chosen.out is not None:
        setting = {key: str(value) for key, value in vars(chosen).items() if key != "out"}
        write_json(
            chosen.out, {"schema": 1, "setting": setting, "machine": machine(), "rows": rows}
        )


if __name__ == "__main__":
    main()
