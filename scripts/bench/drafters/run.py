"""Trains every family, objective and peer for the same time and compares their acceptance. Started
by scripts/bench_drafters."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.target.target import Target
from draftsmith.files import as_values, read_json, write_json
from draftsmith.progress import Progress
from draftsmith.train.config import EvalConfig
from draftsmith.train.data.dataset import Corpus, TokenSequence, read_corpus
from draftsmith.train.evaluate.command import answer_again
from draftsmith.train.evaluate.teacher_forced import DraftRule, count_documents, summarise
from scripts.bench.drafters.cells import FAMILIES, OBJECTIVES, ON_CPU, OURS, Cell, Plan
from scripts.bench.drafters.report import tables
from scripts.bench.machine import machine
from scripts.paths import ROOT

MAX_LENGTH, HELD_OUT = 512, 0.05
DOCUMENTS = 48  # held-out texts that every draft is evaluated on
# draft tokens of the rounds that tau is predicted for; the fewest that a family of the recipes can
# draft
K = 4
PEER = "DRAFTSMITH_SPECULATORS_PYTHON"


class Bench(NamedTuple):
    target: Target
    corpus: Corpus
    held_out: dict[float, list[TokenSequence]]  # by the temperature it was written at
    run: Path
    work: Path


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_drafters",
        description="Acceptance of every family, objective and peer at equal training time.",
    )
    parser.add_argument(
        "--run",
        type=Path,
        default=ROOT / "runs" / "quickstart",
        help="a quickstart folder: its target and data",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "runs" / "drafters",
        help="finished cells are kept here; after a change of the code give another",
    )
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.75,
        help="training time of a cell: CPU time, wall-clock time with CUDA",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument(
        "--objectives",
        nargs="*",
        default=list(OBJECTIVES),
        choices=tuple(OBJECTIVES),
        help="of eagle3",
    )
    return parser.parse_args()


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)
    if not (chosen.run / "data" / "provenance.json").exists():
        print("bench_drafters: no target and data yet, running scripts/quickstart", flush=True)
        subprocess.run([ROOT / "scripts" / "quickstart"], check=True)
    bench = open_bench(chosen.run, chosen.work)
    if PEER not in os.environ:
        print(f"bench_drafters: without speculators, {PEER} does not name its interpreter")
    plan = Plan(
        families=chosen.families, objectives=chosen.objectives, has_peer=PEER in os.environ,
        seeds=chosen.seeds, minutes=chosen.minutes,
    )  # fmt: skip
    rows = measure(bench, list(plan.cells()))
    report = {"schema": 1, "k": K, "minutes": chosen.minutes, "machine": machine(), "rows": rows}
    print(tables(report))
    if chosen.out is not None:
        write_json(chosen.out, report)


def open_bench(run: Path, work: Path) -> Bench:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.load(
        str(run / "target"), dtype="auto" if device.type == "cuda" else torch.float32, device=device
    )
    corpus = read_corpus(
        run / "data", max_length=MAX_LENGTH, vocab_size=target.vocab_size, held_out_share=HELD_OUT
    )
    written_at = float(corpus.provenance["temperature"])
    sampled = corpus.held_out.first(DOCUMENTS)
    again = EvalConfig(target=target.name, draft="", data=(), max_tokens=MAX_LENGTH // 4)
    held_out = {0.0: answer_again(again, 0.0, target, sampled), written_at: sampled}
    return Bench(target, corpus, held_out, run, work)


def measure(bench: Bench, cells: list[Cell]) -> list[dict[str, Any]]:
    waiting = [cell for cell in cells if finished(bench, cell) is None]
    progress = Progress("bench_drafters", total=len(waiting), unit="cells")
    try:
        for done, cell in enumerate(waiting, start=1):
            write_json(bench.work / cell.folder / "cell.json", run(bench, cell))
            progress.update(done, cell.folder)
    except KeyboardInterrupt:
        print(
            "bench_drafters: interrupted; this is what is finished, the same command goes on",
            file=sys.stderr,
        )
    progress.close()
    return [row for cell in cells if (row := finished(bench, cell)) is not None]


def finished(bench: Bench, cell: Cell) -> dict[str, Any] | None:
    """Row of a cell; None where it was measured with other arguments or recipes, or not at all."""
    path = bench.work / cell.folder / "cell.json"
    row = read_json(path, "cell") if path.exists() else None
    return row if row is not None and row["cell"] == cell.to_dict() else None


def run(bench: Bench, cell: Cell) -> dict[str, Any]:
    trained = train(bench, cell)
    evaluations = evaluate(bench, bench.work / cell.folder / "draft")
    return {
        "cell": cell.to_dict(),
        "trained": trained,
        "evaluations": evaluations,
        "load": os.getloadavg()[0],
    }


def evaluate(bench: Bench, draft: Path) -> list[dict[str, Any]]:
    drafter = checkpoint.load(draft, bench.target)
    found = []
    for temperature, sequences in bench.held_out.items():
        rule = DraftRule(temperature, K)
        counts = count_documents(drafter, bench.target, sequences, rule)
        found.append(as_values(summarise(counts, rule)))
    return found


def train(bench: Bench, cell: Cell) -> dict[str, float]:
    """In a process of its own, whose output goes to a log beside the draft."""
    out = bench.work / cell.folder
    out.mkdir(parents=True, exist_ok=True)
    python, module, job = our_job(bench, cell) if cell.trainer == OURS else their_job(bench, cell)
    write_json(out / "job.json", job | {"out": str(out)})
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    with open(out / "log.txt", "w", encoding="utf-8") as log:
        done = subprocess.run(
            [python, "-m", module, out / "job.json"],
            stdout=log,
            stderr=log,
            env=environment,
            cwd=ROOT,
        )
    if done.returncode != 0:
        sys.exit(
            f"bench_drafters: {cell.folder} failed with status {done.returncode}; see "
            f"{out / 'log.txt'}"
        )
    trained = json.loads((out / "trained.json").read_text(encoding="utf-8"))
    tokens = int(bench.corpus.train.lengths.sum())
    # Each trainer counts what is at hand: theirs tokens, ours passes over the data.
    trained |= (
        {"tokens": trained["passes"] * tokens}
        if "passes" in trained
        else {"passes": trained["tokens"] / tokens}
    )
    return trained | {"tokens_per_s": trained["tokens"] / trained["seconds"]}


def our_job(bench: Bench, cell: Cell) -> tuple[str, str, dict[str, Any]]:
    arguments = [
        *cell.command(), "--target", str(bench.run / "target"), "--data", str(bench.run / "data"),
        "--minutes", str(cell.minutes), "--seed", str(cell.seed), "--max-length", str(MAX_LENGTH),
        "--held-out", str(HELD_OUT),
        "--eval-prompts", "0", "--save-every", "1000000",
    ]  # fmt: skip
    return sys.executable, "scripts.bench.drafters.training", {"arguments": arguments}


def their_job(bench: Bench, cell: Cell) -> tuple[str, str, dict[str, Any]]:
    rows = bench.work / "rows.json"
    if not rows.exists():
        texts = bench.corpus.train.first(len(bench.corpus.train))
        write_json(
            rows,
            {"input_ids": [t.input_ids.tolist() for t in texts], "loss_mask": [t.loss_mask.tolist() for t in texts]},
        )  # fmt: skip
    job: dict[str, Any] = {
        "target": str(bench.run / "target"), "rows": str(rows), "seed": cell.seed,
        "budget_s": 60 * cell.minutes,
        "flags": [*cell.arguments, *(() if torch.cuda.is_available() else ON_CPU)],
    }  # fmt: skip
    return os.environ[PEER], "scripts.bench.drafters.speculators_peer", job


if __name__ == "__main__":
    main()
