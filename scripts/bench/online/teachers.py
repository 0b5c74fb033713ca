"""Records against the target's own pass as the teacher of a draft: their distributions, and their
states for a draft that reads them. Started by scripts/bench_teacher."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.distill.buffer.record_table import from_table, to_bytes, to_table
from draftsmith.distill.buffer.traffic import ServedText, stitch
from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.gate.scoring import score
from draftsmith.distill.learn.learner import Learner
from draftsmith.drafters.interface import TrainedDrafter
from draftsmith.drafters.options import DraftLmOptions, Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.remote.outline import load_outline
from draftsmith.drafters.target.target import Target
from draftsmith.files import write_json, write_text
from draftsmith.progress import Progress
from scripts.bench.markdown_table import header, line
from scripts.bench.online.domains import Prompts, asks
from scripts.bench.online.target import SHIPPED
from scripts.bench.online.world import SAMPLING, K, Server, Texts

LAYERS = (0, 7)
DOMAIN = "prose"
MAX_LENGTH = 128
LEARN = LearnConfig(lr=1e-3, max_length=MAX_LENGTH, replay=0.5)
DRAFTED = ("accepted", "first-rejected")
WAYS = {
    "live": LEARN,
    "live, drafted positions alone": replace(LEARN, positions=DRAFTED),
    "recorded": replace(LEARN, teacher="recorded", positions=DRAFTED),
}


@dataclass(frozen=True)
class Shape:
    """Draft of a family, and the depths that it is unrolled over."""

    options: Any
    steps: int


SHAPES = {
    "draft-lm": Shape(DraftLmOptions(target_layers=LAYERS), 1),
    "eagle3": Shape(Eagle3Options(), K),
}


@dataclass(frozen=True)
class Look:
    """State of a learner after some updates."""

    steps: int
    positions: int
    cpu_s: float  # of this thread, training alone
    alpha: float


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_teacher")
    parser.add_argument("--family", choices=SHAPES, default="draft-lm")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48, help="to learn from, and half to judge")
    parser.add_argument("--updates", type=int, default=6, help="of 8 steps each")
    parser.add_argument("--out", type=Path, help="write table (.md) and figures (.json) here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    chosen = options(arguments)
    torch.set_num_threads(1)
    target = Target.load(str(SHIPPED), dtype=torch.float32)
    outline = load_outline(str(SHIPPED), trust_remote_code=False)
    progress = Progress("bench_teacher", total=chosen.seeds * len(WAYS), unit="runs")
    rows: list[dict[str, Any]] = []
    for seed in range(chosen.seeds):
        texts = served(target, chosen.family, chosen.requests * 3 // 2, seed=seed)
        sizes = stored_bytes(texts)
        taught, judged = texts[: chosen.requests], texts[chosen.requests :]
        for name, config in WAYS.items():
            teacher = outline if config.teacher == "recorded" else target
            config = replace(config, unroll=LearnUnroll(steps=SHAPES[chosen.family].steps))
            learner = Learner(new_draft(target, chosen.family, seed), teacher, config, seed=seed)
            looks = curve(learner, target, taught, judged, chosen.updates)
            rows.append({"seed": seed, "way": name, "looks": [asdict(one) for one in looks]})
            progress.update(len(rows), f"seed {seed}, {name}")
    progress.close()
    text = f"{report(rows, chosen.family)}\n\n{sizes}"
    print(text)
    if chosen.out is not None:
        write_text(chosen.out.with_suffix(".md"), text + "\n")
        arguments_of = {
            "family": chosen.family,
            "requests": chosen.requests,
            "updates": chosen.updates,
        }
        write_json(chosen.out.with_suffix(".json"), {"schema": 1, **arguments_of, "rows": rows})


def new_draft(target: Target, family: str, seed: int) -> TrainedDrafter:
    return FAMILIES[family].create(SHAPES[family].options, target, seed=seed)


def served(target: Target, family: str, count: int, *, seed: int) -> list[ServedText]:
    """Texts as the buffer gives them back, written with the draft that then learns."""
    drafter, sink = new_draft(target, family, seed), Texts()
    positions = MAX_LENGTH if drafter.taps else 0
    some = asks(Prompts(target.tokenizer(), seed=seed), [DOMAIN] * count)
    for _ in Server(target, drafter, seed=seed, sink=sink, record_taps=positions).serve(some):
        pass
    texts = [stitch(from_table(to_table(text.records))) for text in sink.taken()]
    return [text for text in texts if text is not None]


def stored_bytes(texts: Sequence[ServedText]) -> str:
    """Size of the records in a shard, by their text's tokens."""
    records = [record for text in texts for record in text.records]
    tokens = sum(len(text.tokens) for text in texts)
    bare = [replace(record, taps=None) for record in records]
    whole, without = (len(to_bytes(some)) / tokens for some in (records, bare))
    raw = sum(record.tap_bytes for record in records) / tokens
    return (
        f"Records of the last seed take {whole:.0f} bytes per token of text; states {raw:.0f} "
        f"before compression, {whole - without:.0f} stored."
    )


def curve(
    learner: Learner,
    target: Target,
    taught: Sequence[ServedText],
    judged: Sequence[ServedText],
    updates: int,
) -> list[Look]:
    parts = np.array_split(np.arange(len(taught)), updates)
    looks = [Look(0, 0, 0.0, alpha(learner.drafter, target, judged))]
    for part in parts:
        begun_s = time.thread_time()
        update = learner.update([taught[index] for index in part])
        worked_s = time.thread_time() - begun_s
        with learner.averaged() as drafter:
            now = alpha(drafter, target, judged)
        last = looks[-1]
        looks.append(
            Look(learner.steps, last.positions + update.tokens, last.cpu_s + worked_s, now)
        )
    return looks


def alpha(drafter: Any, target: Target, texts: Sequence[ServedText]) -> float:
    """Exactly, by the target, at the positions that verification visited."""
    scored = score(drafter, target, texts, max_depth=K, max_length=MAX_LENGTH)
    return float(np.concatenate([one.alpha for one in scored]).mean())


def report(rows: Sequence[dict[str, Any]], family: str) -> str:
    """Means and spread over seeds; equal compute is the CPU time that `recorded` took in all."""
    lines = []
    seeds = sorted({row["seed"] for row in rows})
    looks = {(row["seed"], row["way"]): row["looks"] for row in rows}
    for way in WAYS:
        own = [looks[seed, way] for seed in seeds]
        budgets = [looks[seed, "recorded"][-1]["cpu_s"] for seed in seeds]
        equal = [
            float(np.interp(s, [one["cpu_s"] for one in mine], [one["alpha"] for one in mine]))
            for s, mine in zip(budgets, own, strict=True)
        ]
        lines.append(
            [
                way,
                f"{np.mean([mine[-1]['positions'] for mine in own]):.0f}",
                f"{np.mean([mine[-1]['cpu_s'] for mine in own]):.1f}",
                spread([mine[0]["alpha"] for mine in own]),
                spread([mine[-1]["alpha"] for mine in own]),
                spread(equal),
            ]
        )
    heads = ["teacher", "positions", "CPU s", "alpha before", "after all steps", "at equal CPU s"]
    conditions = (
        f"{family}; {len(seeds)} seeds; {DOMAIN} at T = {SAMPLING.temperature:g}, k = {K}; mean and half "
        "the range over seeds."
    )
    return "\n".join([conditions, "", *header(*heads), *(line(*cells) for cells in lines)])


def spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.4f} +- {np.ptp(values) / 2:.4f}"


if __name__ == "__main__":
    main(sys.argv[1:])
