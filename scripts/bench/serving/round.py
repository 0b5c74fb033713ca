"""Time of a round by its parts; `scripts/bench_round --help`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import torch

from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.target.target import Target
from draftsmith.serve.bench.client import read_prompts
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.stats import PHASES
from scripts.bench.kernels.run import machine
from scripts.demo.pad_target import padded_target
from scripts.paths import ROOT

PROMPT_TOKENS = 48
Row = dict[str, Any]


def inside(engine: EngineCore, prompts: Sequence[list[int]], params: SamplingParams) -> Row:
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


def calls(engine: EngineCore, prompts: Sequence[list[int]], params: SamplingParams) -> int:
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


def measure(target: Path, draft: Path | None, options: argparse.Namespace) -> list[Row]:
    """Called in a process of its own: weights packed into memory that another engine has left are
    read more slowly."""
    torch.set_num_threads(1)
    prompts = read_prompts("stdlib:code", count=max(options.streams), chars=400, seed=0)
    model = Target.load(target, dtype=options.dtype)
    engine = build_engine(
        model, None if draft is None else load(draft, model), EngineConfig(k=options.k)
    )
    tokenizer = model.tokenizer()
    ids = [tokenizer(prompt["prompt"])["input_ids"][:PROMPT_TOKENS] for prompt in prompts]
    rows = []
    for temperature in options.temperature:
        for streams in options.streams:
            params = SamplingParams(
                max_tokens=options.max_tokens, temperature=temperature, ignore_eos=True, seed=0
            )
            # The first turn warms up.
            found = [inside(engine, ids[:streams], params) for _ in range(options.repeats + 1)]
            row = {name: statistics.median(one[name] for one in found[1:]) for name in found[0]}
            row["calls"] = calls(engine, ids[:streams], params)
            label = "no draft" if draft is None else draft.name
            rows.append({"label": label, "temperature": temperature, "streams": streams} | row)
            print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    cells = [row["label"], f"{row['temperature']:g}", str(row["streams"]), f"{row['tokens']:.2f}"]
    cells += [f"{row[name]:.2f}" for name in (*PHASES, "round")]
    cells.append(str(row["calls"]))
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser()
    shipped = ROOT / "scripts"
    parser.add_argument("--target", type=Path, default=shipped / "quickstart_target", help="folder")
    parser.add_argument("--draft", type=Path, default=shipped / "quickstart_draft")
    parser.add_argument("--parameters", help="pad the target to so many, for example 100M")
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
    target = padded_target(options.target, options.parameters)
    print("| draft | T | streams | tokens | " + " | ".join([*PHASES, "round", "calls"]) + " |")
    print("|" + "---|" * (len(PHASES) + 6), flush=True)
    rows: list[Row] = []
    for draft in (None, options.draft):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            rows += fresh.submit(measure, target, draft, options).result()
    report = {
        "machine": machine(torch.device("cpu")),
        "rows": rows,
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
