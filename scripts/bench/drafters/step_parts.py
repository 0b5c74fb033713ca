"""Speed, memory and the time of each part of a training step, family by family; then our EAGLE-3
beside the peers' at one configuration. Started by scripts/bench_train.

A training is a process of its own: its CPU time is counted, and the growth of its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.target.target import Target
from draftsmith.files import write_json
from draftsmith.train.data.dataset import read_corpus
from scripts.bench.drafters import figures, report
from scripts.bench.drafters.cells import FAMILIES, PEERS, WARM_S, Plan, recipe
from scripts.bench.drafters.parts import BACKWARD, DATA, HEAD, OPTIMIZER, TARGET
from scripts.bench.drafters.run import (
    HELD_OUT,
    MAX_LENGTH,
    Bench,
    check_work,
    clock,
    machine,
    measure,
    present,
)
from scripts.bench.markdown_table import header, line
from scripts.paths import ROOT

PROFILED = ("eagle3", "mtp", "dflash", "dspark", "p-eagle", "draft-lm")
HERE = "here"


class Side(NamedTuple):
    """Code that trains: this checkout's, or another's."""

    name: str
    source: Path  # its `src`


class Training(NamedTuple):
    family: str
    side: Side
    turn: int


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_train", description=__doc__)
    parser.add_argument(
        "--run",
        type=Path,
        default=ROOT / "runs" / "quickstart",
        help="a quickstart folder: its target and data",
    )
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "train-parts")
    parser.add_argument("--families", nargs="*", default=list(PROFILED), choices=FAMILIES)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each training")
    parser.add_argument("--turns", type=int, default=3, help="trainings of each, by turns")
    parser.add_argument(
        "--beside", type=Path, nargs="*", default=[], help="other checkouts, trained by turns"
    )
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument(
        "--warm-up",
        type=float,
        default=WARM_S,
        help=f"seconds that SpecForge trains before it is measured [{WARM_S:g}]",
    )
    parser.add_argument(
        "--with", nargs="*", default=[], dest="words", help="options of `train`, as `batch_size=8`"
    )
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if not (chosen.run / "data" / "provenance.json").exists():
        sys.exit(
            f"bench_train: {str(chosen.run)!r} holds no target and data; run scripts/quickstart, or "
            "give --run"
        )
    rows = list(profiled(chosen))
    print("\n".join(table(rows)))
    equal = beside_peers(chosen)
    if equal:
        print("\n" + report.tables({"k": 0, "rows": equal}))
    if chosen.out is not None:
        write_json(
            chosen.out,
            {
                "schema": 1,
                "clock": clock(),
                "machine": machine(),
                "with": chosen.words,
                "parts": rows,
                "equal": equal,
            },
        )


def profiled(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    sides = sides_of(chosen.beside)
    lengths = read_corpus(
        chosen.run / "data", max_length=MAX_LENGTH, vocab_size=2**31, held_out_share=HELD_OUT
    ).train.lengths
    rows = []
    for family in chosen.families:
        for turn in range(chosen.turns):
            for side in sides:
                trained = train(chosen, Training(family, side, turn))
                tokens = trained["passes"] * int(lengths.sum())
                rows.append(
                    {"family": family, "side": side.name, "turn": turn, "load": os.getloadavg()[0]}
                    | trained
                    | {"tokens": tokens, "tokens_per_s": tokens / trained["seconds"]}
                )
    return rows


def sides_of(beside: Sequence[Path]) -> list[Side]:
    """This checkout and those beside it, whose folders are named otherwise each."""
    names = [HERE, *(one.name for one in beside)]
    for name in names:
        if names.count(name) > 1:
            sys.exit(
                f"bench_train: two checkouts would be called {name!r} in the table; give --beside a "
                "folder of another name"
            )
    return [Side(HERE, ROOT / "src"), *(Side(one.name, one / "src") for one in beside)]


def train(chosen: argparse.Namespace, training: Training) -> dict[str, Any]:
    family, side, turn = training
    out = chosen.work.absolute() / family / side.name / f"turn-{turn}"
    out.mkdir(parents=True, exist_ok=True)
    words = (str(ROOT / word) for word in recipe(family))
    arguments = [
        family, *words, "--target", str(chosen.run / "target"), "--data", str(chosen.run / "data"),
        "--minutes", str(chosen.seconds / 60), "--seed", str(turn), "--held-out", str(HELD_OUT),
        "--eval-prompts", "0", "--save-every", "1000000", *chosen.words,
    ]  # fmt: skip
    write_json(out / "job.json", {"arguments": arguments, "out": str(out), "parts": True})
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(side.source), str(ROOT)]),
    }
    with open(out / "log.txt", "w", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, "-m", "scripts.bench.drafters.training", out / "job.json"],
            stdout=log, stderr=log, env=environment, cwd=ROOT,
        )  # fmt: skip
    if done.returncode:
        sys.exit(
            f"bench_train: {family} failed with status {done.returncode}; see {out / 'log.txt'}"
        )
    return dict(json.loads((out / "trained.json").read_text(encoding="utf-8")))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Means over turns; milliseconds are of a step."""
    if not rows:
        return []
    several = len({row["side"] for row in rows}) > 1
    depths = sorted({part for row in rows for part in row["parts"] if part.startswith("depth")})
    parts = [TARGET, *depths, HEAD, BACKWARD, OPTIMIZER, DATA]
    lines = header(
        "family", "tokens/s", "peak growth, MiB", "ms a step", *parts, "the rest"
    )  # fmt: skip
    for family, side in dict.fromkeys((row["family"], row["side"]) for row in rows):
        found = {row["turn"]: row for row in rows if (row["family"], row["side"]) == (family, side)}
        of_parts = [figures.over_seeds(found, partial(ms_of, part)) for part in parts]
        whole = figures.over_seeds(found, partial(ms_of, None))
        rest = whole.mean - sum(part.mean for part in of_parts)
        lines.append(
            line(
                f"{family}, {side}" if several else family,
                figures.over_seeds(found, itemgetter("tokens_per_s")).text(0),
                report.mib(figures.over_seeds(found, itemgetter("training_bytes"))).text(0),
                whole.text(0),
                *(f"{part.mean:.1f}" for part in of_parts),
                f"{rest:.1f}",
            )
        )
    return lines


def ms_of(part: str | None, row: dict[str, Any]) -> float:
    """Milliseconds of a step's part; None: of all of it."""
    seconds = row["seconds"] if part is None else row["parts"].get(part, 0.0)
    return 1e3 * float(seconds) / float(row["steps"])


def beside_peers(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    peers = present(chosen.peers)
    if not peers:
        return []
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.load(str(chosen.run / "target"), dtype=torch.float32, device=device)
    corpus = read_corpus(
        chosen.run / "data",
        max_length=MAX_LENGTH,
        vocab_size=target.vocab_size,
        held_out_share=HELD_OUT,
    )
    work = chosen.work.absolute() / "equal"
    check_work(work, {"target": target.revision, "data": corpus.provenance})
    plan = Plan(
        families=(),
        objectives=(),
        peers=peers,
        seeds=chosen.turns,
        minutes=chosen.seconds / 60,
        row_tokens=int(corpus.train.lengths.max()),
        served=False,
        warm_s=chosen.warm_up,
    )
    cells = [cell for seed in range(chosen.turns) for cell in plan.equal(seed)]
    return measure(Bench(target, corpus, {}, chosen.run.absolute(), work), cells)


if __name__ == "__main__":
    main()
