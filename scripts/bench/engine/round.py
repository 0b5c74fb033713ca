"""Time of a round by its parts, without a server and over HTTP; `scripts/bench_round --help`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import httpx
import torch
import transformers

from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.target.target import Target
from draftsmith.serve.bench.client import Client
from draftsmith.serve.bench.prompts import read_prompts
from draftsmith.serve.bench.server import ServerProcess, started
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.stats import PHASES
from scripts.demo.pad_target import target_of
from scripts.paths import ROOT

TIMEOUT_S = 600.0
Row = dict[str, Any]


def inside(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> Row:
    """All prompts at once in this process: ms per round by phase, medians of the rounds in which all
    of them decode."""
    requests = [engine.submit(prompt, params) for prompt in prompts]
    phases: dict[str, list[float]] = {name: [] for name in (*PHASES, "round")}
    tokens = []
    while engine.scheduler.busy:
        decoding = all(not request.prefilling and not request.finished for request in requests)
        before, begun_s = dict(engine.stats.time_s), perf_counter()
        written = sum(request.num_output for request in requests)
        engine.step()
        if not decoding:
            continue
        phases["round"].append(perf_counter() - begun_s)
        tokens.append(sum(request.num_output for request in requests) - written)
        for name in PHASES:
            phases[name].append(engine.stats.time_s[name] - before[name])
    return {name: 1e3 * statistics.median(values) for name, values in phases.items()} | {
        "tokens": statistics.mean(tokens) / len(prompts)
    }


def calls(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> int:
    """Python functions that a round calls in which all prompts decode: as many on a loaded machine
    as on a quiet one."""
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while any(request.num_output < 2 for request in requests):
        engine.step()
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    for request in requests:
        engine.cancel(request)
    return count


def over_http(
    server: ServerProcess, prompts: Sequence[dict[str, Any]], body: dict[str, Any]
) -> Row:
    """The same against a server: ms of wall time a round and what its engine says of it, means;
    prompts are read in it. "loop" is ms of CPU time of the event loop's thread by chunk of an
    answer."""

    async def measure() -> float:
        client = Client(server.url, api_key=None, timeout_s=TIMEOUT_S)
        try:
            return (
                await client.measure(prompts, body | {"model": await client.model()}, len(prompts))
            ).wall_s
        finally:
            await client.http.aclose()

    before, begun_s = counters(server.url), server.http_cpu_s()
    wall_s = asyncio.run(measure())
    ended_s = server.http_cpu_s()
    spent = {name: value - before[name] for name, value in counters(server.url).items()}
    rounds, chunks = spent.pop("rounds"), spent.pop("gaps") + len(prompts)
    row = {"http": 1e3 * wall_s / rounds} | {
        f"http {name}": 1e3 * value / rounds for name, value in spent.items()
    }
    if begun_s is None or ended_s is None:
        return row
    return row | {"loop": 1e3 * (ended_s - begun_s) / chunks}


def counters(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    phases = re.findall(
        r'^draftsmith_time_seconds_total\{.*phase="(\w+)".*\} (\S+)$', text, re.MULTILINE
    )
    rounds = re.findall(r"^draftsmith_rounds_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    gaps = re.findall(r"^vllm:inter_token_latency_seconds_count\{.*\} (\S+)$", text, re.MULTILINE)
    found = {name: float(value) for name, value in phases}
    return found | {"rounds": float(rounds[0]), "gaps": float(gaps[0])}


def measure(target: Path, draft: Path | None, options: argparse.Namespace) -> list[Row]:
    """Called in a process of its own: weights packed into memory that another engine has left are
    read more slowly."""
    torch.set_num_threads(1)
    prompts = read_prompts(str(options.prompts), count=max(options.streams), chars=400, seed=0)
    model = Target.load(target, dtype=options.dtype)
    engine = build_engine(
        model, None if draft is None else load(draft, model), EngineConfig(k=options.k)
    )
    tokenizer = model.tokenizer()
    ids = [tokenizer(prompt["prompt"])["input_ids"] for prompt in prompts]
    arguments = ["--target", str(target), "--k", str(options.k), "--threads", "1"]
    arguments += ["--dtype", options.dtype]
    rows = []
    with started(
        arguments + ([] if draft is None else ["--draft", str(draft)]), timeout_s=TIMEOUT_S
    ) as server:
        for temperature in options.temperature:
            for streams in options.streams:
                body = {
                    "max_tokens": options.max_tokens,
                    "temperature": temperature,
                    "ignore_eos": True,
                    "seed": 0,
                }
                params = SamplingParams(**body)
                found = []
                # In turns, so that a loaded machine slows them alike; the first turn warms up.
                for _ in range(options.repeats + 1):
                    found.append(
                        inside(engine, ids[:streams], params)
                        | over_http(server, prompts[:streams], body)
                    )
                row = {name: statistics.median(one[name] for one in found[1:]) for name in found[0]}
                row["calls"] = calls(engine, ids[:streams], params)
                label = "no draft" if draft is None else draft.name
                rows.append({"label": label, "temperature": temperature, "streams": streams} | row)
                print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    cells = [row["label"], f"{row['temperature']:g}", str(row["streams"]), f"{row['tokens']:.2f}"]
    cells += [f"{row[name]:.2f}" for name in (*PHASES, "round", "http")]
    cells += [f"{row['http'] - row['round']:.2f}", f"{row['loop']:.3f}" if "loop" in row else "-"]
    cells.append(str(row["calls"]))
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--run",
        type=Path,
        default=ROOT / "runs" / "quickstart",
        help="a finished quickstart folder",
    )
    parser.add_argument("--draft", type=Path, help="another draft than its EAGLE-3")
    parser.add_argument("--parameters", help="pad the run's target to so many, for example 100M")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--repeats", type=int, default=9, help="turns that count, after one that warms up"
    )
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, help="writes the JSON here too")
    options = parser.parse_args()
    source = options.run / "bench-prompts.jsonl"
    options.prompts = source if source.exists() else "stdlib:code"
    target = target_of(options.run, options.parameters)
    load_before = os.getloadavg()[0]
    print(
        "| draft | T | streams | tokens | "
        + " | ".join([*PHASES, "engine", "over HTTP", "HTTP adds", "loop, a chunk", "calls"])
        + " |"
    )
    print("|" + "---|" * 13, flush=True)
    rows: list[Row] = []
    for draft in (None, options.draft or options.run / "eagle3"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            rows += fresh.submit(measure, target, draft, options).result()
    report = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "cores": os.cpu_count(),
        "load_average_before": load_before,
        "rows": rows,
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
