"""CPU time that each part of `--k auto` adds to rounds that draft nothing; `scripts/bench_auto
--parts`."""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time
from typing import Any

from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.auto import AutoControl
from draftsmith.serve.control.control import MAX_AUTO_K, Control, FixedControl
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.sampling.params import SamplingParams
from scripts.bench.engine.round import calls
from scripts.bench.markdown_table import header, line

NONE, AGAIN, IDLE, AUTO = "no draft", "no draft, again", "idle draft", "k auto"
Row = dict[str, Any]


class AtRest(FixedControl):
    """k = 0 in every round, without a look at its rows."""

    def rests(self, classes: Set[str], num_rows: int, num_tokens: int) -> bool:
        return True


class Watching(AutoControl):
    """Every round is chosen for and measured, and no other k is tried."""

    def __init__(self) -> None:
        super().__init__(start=0)

    def _rest(self, *unused: object) -> None:
        return

    def _worth(self, *unused: object) -> float:
        return 0.0


@dataclass
class Part:
    """An engine, and the seconds of its rounds in which all requests decode."""

    engine: Engine
    k: int | None = None  # of its requests; None is the engine's own
    all_s: list[float] = field(default_factory=list)
    rounds: Counter[int] = field(default_factory=Counter)  # by k


def parts(options: argparse.Namespace, target: Path) -> dict[str, Part]:
    """Engines over the same weights, each with one part more than the one before."""
    model = Target.load(target, dtype=options.dtype)
    drafter = load(options.draft, model)

    def engine(control: Control) -> Engine:
        made = build_engine(model, drafter, EngineConfig(k=MAX_AUTO_K, adaptive=True))
        made.scheduler.control = control
        return made

    return {
        NONE: Part(build_engine(model, None, EngineConfig())),
        AGAIN: Part(build_engine(model, None, EngineConfig())),
        IDLE: Part(engine(FixedControl()), k=0),
        "+ states kept": Part(engine(AtRest())),
        "+ every round chosen and measured": Part(engine(Watching())),
        AUTO: Part(engine(AutoControl())),
    }


def measure(
    found: dict[str, Part],
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
    temperature: float,
    streams: int,
) -> list[Row]:
    """Rows of one load. The engines take turns at every round, in an order drawn each time; the
    first turn over the prompts warms up."""
    chance = random.Random(0)
    groups = [prompts[begin : begin + streams] for begin in range(0, len(prompts), streams)]
    for part in found.values():
        part.all_s, part.rounds = [], Counter()
    for turn in range(options.repeats + 1):
        for group in groups:
            _answer(found, group, options, temperature, chance, counts=turn > 0)
    plain_s = {name: kind(found[NONE].all_s) for name, kind in KINDS.items()}
    return [
        {
            "engine": name, "temperature": temperature, "streams": streams,
            **{f"{key}_us": 1e6 * kind(part.all_s) for key, kind in KINDS.items()},
            **{f"{key}_more_us": 1e6 * (kind(part.all_s) - plain_s[key]) for key, kind in KINDS.items()},
            "over_none": plain_s["mean"] / _mean(part.all_s),
            "calls": calls(part.engine, prompts[:streams], _params(part, options, temperature)),
            "rounds_by_k": dict(sorted(part.rounds.items())),
        }
        for name, part in found.items()
    ]  # fmt: skip


def _mean(seconds: Sequence[float]) -> float:
    """Mean without the longest hundredth, in which others had the core."""
    return statistics.fmean(sorted(seconds)[: max(1, len(seconds) * 99 // 100)])


KINDS: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": _mean,
}


def _params(part: Part, options: argparse.Namespace, temperature: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=options.max_tokens, temperature=temperature, ignore_eos=True, k=part.k
    )


def _answer(
    found: dict[str, Part],
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
    temperature: float,
    chance: random.Random,
    *,
    counts: bool,
) -> None:
    requests, before = {}, {}
    for name, part in found.items():
        params = _params(part, options, temperature)
        requests[name] = [part.engine.submit(prompt, params) for prompt in prompts]
        before[name] = Counter(part.engine.stats.rounds_by_k)
    busy = list(found)
    while busy:
        chance.shuffle(busy)
        for name in list(busy):
            engine = found[name].engine
            decoding = not any(one.prefilling or one.finished for one in requests[name])
            begun_s = thread_time()
            engine.step()
            if counts and decoding:
                found[name].all_s.append(thread_time() - begun_s)
            if not engine.scheduler.busy:
                busy.remove(name)
                if counts:
                    found[name].rounds += engine.stats.rounds_by_k - before[name]


def table(rows: Sequence[Row]) -> list[str]:
    lines = header(
        "engine",
        "T",
        "streams",
        "median us",
        "more",
        "mean us",
        "more",
        "/ no draft",
        "calls",
        "rounds at k",
    )
    for row in rows:
        total = sum(row["rounds_by_k"].values())
        shares = ", ".join(f"{k}: {n / total:.1%}" for k, n in row["rounds_by_k"].items())
        cells = (row["engine"], f"{row['temperature']:g}", row["streams"])
        numbers = [f"{row[name]:.0f}" for name in ("median_us", "median_more_us", "mean_us", "mean_more_us")]  # fmt: skip
        lines.append(line(*cells, *numbers, f"{row['over_none']:.3f}", row["calls"], shares))
    return lines
