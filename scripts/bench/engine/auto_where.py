"""CPU time that `--k auto` takes over no draft, by the kind of round; `scripts/bench_auto
--where`."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from time import thread_time
from typing import Any, NamedTuple

from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import MAX_AUTO_K
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.engine.scheduler import Schedule
from draftsmith.serve.sampling.params import SamplingParams
from scripts.bench.engine.auto_parts import AGAIN, AUTO, IDLE, NONE
from scripts.bench.markdown_table import header, line

Row = dict[str, Any]

PROMPTS, LATE, DRAFTED = "prompts", "text read late", "drafted"
MEASURED, REST, ARRIVALS = "measured, no drafts", "at rest", "arrivals"
KINDS = (PROMPTS, LATE, DRAFTED, MEASURED, REST, ARRIVALS)
TRIMMED = 0.05  # share of the rounds of a kind left out at either end, in which others had the core


class Spent(NamedTuple):
    """CPU time of a round, or of the arrivals before one."""

    kind: str
    cpu_s: float
    steps: float = 1.0  # rounds without drafts that decide as many tokens


@dataclass
class Watched:
    """An engine whose rounds are booked by their kind, and its rounds beyond those without a draft
    in CPU seconds."""

    engine: Engine
    k: int | None = None  # of its requests; None is the engine's own
    more_s: dict[str, list[float]] = field(default_factory=dict)
    _schedule: Schedule = field(default_factory=Schedule)
    _kind: str = PROMPTS

    def __post_init__(self) -> None:
        schedule = self.engine.scheduler.schedule

        def scheduled() -> Schedule:
            self._schedule = schedule()
            self._kind = kind_of(self._schedule, learns=self.engine.scheduler.control.learns)
            return self._schedule

        self.engine.scheduler.schedule = scheduled  # type: ignore[method-assign]

    def submit(self, prompts: Sequence[list[int]], params: SamplingParams) -> Spent:
        begun_s = thread_time()
        for prompt in prompts:
            self.engine.submit(prompt, params)
        return Spent(ARRIVALS, thread_time() - begun_s)

    def step(self) -> Spent:
        tokens, begun_s = self.engine.stats.num_generation_tokens, thread_time()
        self.engine.step()
        spent_s = thread_time() - begun_s
        tokens = self.engine.stats.num_generation_tokens - tokens
        return Spent(self._kind, spent_s, tokens / max(1, self._schedule.num_deciding))


def kind_of(schedule: Schedule, *, learns: bool) -> str:
    """Kind of a round about to run."""
    if schedule.filling or any(row.request.num_output == 0 for row in schedule.sampling):
        return PROMPTS
    if schedule.drafting:
        unread = sum(row.request.num_tokens - row.request.draft.cached for row in schedule.drafting)
        usual = sum(row.count + row.k for row in (*schedule.drafting, *schedule.sampling))
        return LATE if unread > 2 * usual else DRAFTED
    at_rest = schedule.plan is None or schedule.plan.at_rest
    return MEASURED if learns and not at_rest else REST


def watched(options: argparse.Namespace, target: Path) -> dict[str, Watched]:
    """Engines over the same weights, so that each finds them in the caches as often."""
    model = Target.load(target, dtype=options.dtype)
    drafter = load(options.draft, model)
    plain, auto = EngineConfig(k=max(options.k)), EngineConfig(k=MAX_AUTO_K, adaptive=True)
    return {
        NONE: Watched(build_engine(model, None, plain)),
        AGAIN: Watched(build_engine(model, None, plain)),
        IDLE: Watched(build_engine(model, drafter, plain), k=0),
        AUTO: Watched(build_engine(model, drafter, auto)),
    }


def measure(
    found: dict[str, Watched],
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
    temperature: float,
    streams: int,
) -> list[Row]:
    """Rows of one load: of its first turn over the prompts, which learns, and of the others. The
    engines take turns at every round, in an order drawn each time."""
    chance = random.Random(0)
    groups = [prompts[begin : begin + streams] for begin in range(0, len(prompts), streams)]
    rows = []
    for name, turns in (("first", 1), ("others", options.repeats)):
        plain_s = 0.0
        for one in found.values():
            one.more_s = {kind: [] for kind in KINDS}
        for _ in range(turns):
            for group in groups:
                plain_s += _answer(found, group, options.max_tokens, temperature, chance)
        rows += [
            {
                "engine": engine, "temperature": temperature, "streams": streams, "turns": name,
                "none_s": plain_s,
                "whole": sum(map(sum, one.more_s.values())) / plain_s,
                "rounds": {kind: len(one.more_s[kind]) for kind in KINDS},
                "more_us": {kind: 1e6 * _mean(one.more_s[kind]) for kind in KINDS},
                "share": {
                    kind: len(one.more_s[kind]) * _mean(one.more_s[kind]) / plain_s
                    for kind in KINDS
                },
            }
            for engine, one in found.items()
            if engine != NONE
        ]  # fmt: skip
    return rows


def _mean(seconds: Sequence[float]) -> float:
    cut = int(TRIMMED * len(seconds))
    return fmean(sorted(seconds)[cut : len(seconds) - cut]) if seconds else 0.0


def _answer(
    found: dict[str, Watched],
    prompts: Sequence[list[int]],
    num_tokens: int,
    temperature: float,
    chance: random.Random,
) -> float:
    """Answer all prompts at once; CPU seconds without a draft. An engine's round is held against
    the one without a draft of the same turn."""

    def submit(name: str) -> Spent:
        params = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, ignore_eos=True, k=found[name].k
        )
        return found[name].submit(prompts, params)

    def in_turns(act: Callable[[str], Spent]) -> float:
        chance.shuffle(busy)
        spent = {name: act(name) for name in busy}
        for name, one in spent.items():
            more_s = one.cpu_s - one.steps * spent[NONE].cpu_s
            found[name].more_s[one.kind].append(more_s)
        return spent[NONE].cpu_s

    busy = list(found)
    plain_s = in_turns(submit)
    while found[NONE].engine.scheduler.busy:
        plain_s += in_turns(lambda name: found[name].step())
        busy = [name for name in busy if found[name].engine.scheduler.busy]
    return plain_s


def table(rows: Sequence[Row]) -> list[str]:
    lines = header("engine", "T", "streams", "turns", "/ no draft", "nothing left out", *KINDS)
    for row in rows:
        cells = [
            f"{row['rounds'][kind]} x {row['more_us'][kind]:+.0f} us: {row['share'][kind]:+.1%}"
            for kind in KINDS
        ]
        setting = (row["engine"], f"{row['temperature']:g}", row["streams"], row["turns"])
        speeds = [f"{1 / (1 + more):.3f}" for more in (sum(row["share"].values()), row["whole"])]
        lines.append(line(*setting, *speeds, *cells))
    return lines
