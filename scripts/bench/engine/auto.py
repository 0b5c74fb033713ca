"""`--k auto`, fixed k and an idle draft beside no draft, in one process; `scripts/bench_auto
--help`."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.target.target import Target
from draftsmith.files import write_json
from draftsmith.serve.bench.prompts import read_prompts
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import MAX_AUTO_K
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.warm_up import warm_up
from scripts.bench.engine import auto_parts, auto_where
from scripts.bench.engine.auto_parts import AGAIN, AUTO, IDLE, NONE
from scripts.bench.markdown_table import header, line
from scripts.demo.pad_target import target_of
from scripts.paths import ROOT

Row = dict[str, Any]


@dataclass
class Player:
    """An engine, and what it did in the turn under way.

    Args:
        k: what its requests ask for; None is the engine's own.
    """

    engine: Engine
    k: int | None = None
    tokens: int = 0
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)  # tokens per second, by turn
    first: float = 0.0  # that of the turn that warms up
    rounds: Counter[int] = field(default_factory=Counter)  # by k, all turns

    def answer(self, prompts: Sequence[list[int]], temperature: float, num_tokens: int) -> None:
        """Answer all prompts at once."""
        params = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, ignore_eos=True, k=self.k
        )
        before, begun_s = Counter(self.engine.stats.rounds_by_k), perf_counter()
        requests = [self.engine.submit(prompt, params) for prompt in prompts]
        while self.engine.scheduler.busy:
            self.engine.step()
        self.seconds += perf_counter() - begun_s
        self.tokens += sum(request.num_output for request in requests)
        self.rounds += self.engine.stats.rounds_by_k - before

    def end_turn(self) -> None:
        self.rates.append(self.tokens / self.seconds)
        self.tokens, self.seconds = 0, 0.0

    def forget(self) -> None:
        """Drop what a turn that warms up has left; what the engine's control measured stays."""
        self.first = self.rates[-1] if self.rates else 0.0
        self.rates.clear()
        self.rounds.clear()


def players(
    load_target: Callable[[], Target],
    draft: Path,
    fixed: Sequence[int],
    only: Collection[str] | None = None,
) -> dict[str, Player]:
    """An engine each, with a target of its own, as servers would have.

    Args:
        fixed: values of k, above 0.
        only: names of those that are made; None: all.
    """

    def engine(has_draft: bool, k: int, adaptive: bool = False) -> Engine:
        target = load_target()
        drafter = load(draft, target) if has_draft else None
        built = build_engine(target, drafter, EngineConfig(k=k, adaptive=adaptive))
        warm_up(built)
        return built

    most = max(fixed)
    makers: dict[str, Callable[[], Player]] = {
        NONE: lambda: Player(engine(False, most)),
        AGAIN: lambda: Player(engine(False, most)),
        IDLE: lambda: Player(engine(True, most), k=0),
        **{f"k = {k}": partial(lambda k: Player(engine(True, k)), k) for k in fixed},
        AUTO: lambda: Player(engine(True, MAX_AUTO_K, adaptive=True)),
    }
    return {name: make() for name, make in makers.items() if only is None or name in only}


def measure(
    found: dict[str, Player],
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
    temperature: float,
    streams: int,
) -> list[Row]:
    """Rows of one load. The engines take turns at every group of requests; the first turn warms
    up."""
    groups = [prompts[begin : begin + streams] for begin in range(0, len(prompts), streams)]
    for player in found.values():
        player.forget()
    order, chance = list(found), random.Random(0)
    for turn in range(options.repeats + 1):
        for group in groups:
            order = next_order(order, chance)
            for name in order:
                found[name].answer(group, temperature, options.max_tokens)
        for player in found.values():
            player.end_turn()
            if turn == 0:
                player.forget()
    rows = []
    for name, player in found.items():
        ratios = [one / none for one, none in zip(player.rates, found[NONE].rates, strict=True)]
        rows.append(
            {
                "engine": name, "temperature": temperature, "streams": streams,
                "tokens_per_s": statistics.median(player.rates),
                "over_none": statistics.median(ratios),
                "lowest": min(ratios), "highest": max(ratios),
                "first_turn": player.first / found[NONE].first,
                "rounds_by_k": dict(sorted(player.rounds.items())),
            }
        )  # fmt: skip
    return with_best(rows)


def next_order(before: Sequence[str], chance: random.Random) -> list[str]:
    """Another order of the same engines, in which none follows itself: it would find its weights
    in the caches, which the others do not."""
    while True:
        order = chance.sample(before, len(before))
        if order[0] != before[-1]:
            return order


def with_best(rows: list[Row]) -> list[Row]:
    """`--k auto` over the best fixed k, 0 included, by the same medians."""
    fixed = [row["over_none"] for row in rows if row["engine"].startswith("k = ")]
    best = max(1.0, *fixed)
    return [
        row | ({"over_best": row["over_none"] / best} if row["engine"] == AUTO else {})
        for row in rows
    ]


def table(rows: Sequence[Row]) -> list[str]:
    names = ("engine", "T", "streams", "tok/s", "/ no draft", "/ best fixed k", "first turn")
    lines = header(*names, "rounds at k")
    for row in rows:
        spread = f"{row['over_none']:.2f} ({row['lowest']:.2f} - {row['highest']:.2f})"
        best = f"{row['over_best']:.2f}" if "over_best" in row else "-"
        rounds = sum(row["rounds_by_k"].values())
        shares = ", ".join(f"{k}: {n / rounds:.0%}" for k, n in row["rounds_by_k"].items())
        cells = (row["engine"], f"{row['temperature']:g}", row["streams"])
        first = f"{row['first_turn']:.2f}"
        lines.append(line(*cells, f"{row['tokens_per_s']:.0f}", spread, best, first, shares))
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "quickstart")
    parser.add_argument("--draft", type=Path, help="another draft than the run's EAGLE-3")
    parser.add_argument("--parameters", help="pad the run's target to so many, for example 100M")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3], help="fixed k, above 0")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5, help="turns after one that warms up")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--parts",
        action="store_true",
        help="CPU time of a round without drafts by the parts of k auto, engines in turns at "
        "every round",
    )
    parser.add_argument(
        "--where",
        action="store_true",
        help="CPU time of k auto over no draft by the kind of round, engines in turns at every "
        "round",
    )
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    options.draft = options.draft or options.run / "eagle3"
    return options


def loads(
    options: argparse.Namespace, target: Path, prompts: Sequence[list[int]]
) -> tuple[Callable[[float, int], list[Row]], Callable[[Sequence[Row]], list[str]]]:
    """(rows of a load, their table), of whole answers or of rounds by their parts."""
    if options.parts:
        parts = auto_parts.parts(options, target)
        return partial(auto_parts.measure, parts, prompts, options), auto_parts.table
    if options.where:
        booked = auto_where.watched(options, target)
        return partial(auto_where.measure, booked, prompts, options), auto_where.table
    found = players(partial(Target.load, target, dtype=options.dtype), options.draft, options.k)
    return partial(measure, found, prompts, options), table


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    target = target_of(options.run, options.parameters)
    tokenizer = Target.load(target).tokenizer()
    read = read_prompts("stdlib:code", count=options.prompts, chars=1000, seed=0)
    prompts = [tokenizer(prompt["prompt"])["input_ids"][: options.prompt_tokens] for prompt in read]
    rows: list[Row] = []
    measure_load, lines_of = loads(options, target, prompts)
    for temperature in options.temperature:
        for streams in options.streams:
            new = measure_load(temperature, streams)
            print("\n".join(lines_of(new)), flush=True)
            rows += new
    report = {
        "setting": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
            if name not in ("run", "draft", "out")
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "cores": os.cpu_count(),
        "rows": rows,
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        write_json(options.out, report)


if __name__ == "__main__":
    main()
