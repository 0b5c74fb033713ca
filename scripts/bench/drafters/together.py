"""Time and memory of several families trained on one pass of the target, beside each trained by
itself. Started by scripts/bench_together.

The target has random weights and the texts random tokens: neither changes the time. A cell is a
process of its own, and its time the meter's, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.files import write_json
from draftsmith.train import session, shared
from draftsmith.train.command import run
from draftsmith.train.config import FAMILIES, TrainConfig
from draftsmith.train.optim import Clock
from draftsmith.train.quiet import quiet
from scripts.bench.drafters.meter import Meter

NUMBERS = {
    "layers": (24, "of the target"),
    "hidden": (256, "width of the target, a multiple of 64"),
    "vocab": (2048, "tokens of its vocabulary"),
    "rows": (2, "texts of a batch"),
    "length": (128, "tokens of a text"),
    "steps": (6, "of a training"),
    "repeats": (3, "paired measurements"),
}


class Cell(NamedTuple):
    seconds: float  # from the first step to the last
    mebibytes: float  # at most, with target and drafts, without libraries


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench_together", description=__doc__)
    parser.add_argument("--families", nargs="+", default=["eagle3", "mtp"], choices=FAMILIES)
    for name, (default, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} [{default}]")
    options = parser.parse_args()
    quiet()
    pairs = []
    print(
        f"{'':>10}{'seconds':>19}{'MiB at most':>20}\n{'':>10}"
        + f"{'apart':>9}{'together':>10}" * 2
    )
    with tempfile.TemporaryDirectory() as folder:
        config = configured(options, Path(folder))
        for repeat in range(options.repeats):
            apart, together = pair(config, options.families, together_first=repeat % 2 == 1)
            pairs.append((apart, together))
            cells = (apart.seconds, together.seconds, apart.mebibytes, together.mebibytes)
            print(
                f"{repeat + 1:>10}"
                + "".join(f"{value:>{9 + at % 2}.1f}" for at, value in enumerate(cells))
            )
    times = [together.seconds / apart.seconds for apart, together in pairs]
    sizes = [together.mebibytes / apart.mebibytes for apart, together in pairs]
    print(f"together / apart: time {spread(times)}, memory {spread(sizes)}")
    return 0


def pair(
    config: TrainConfig, families: Sequence[str], *, together_first: bool
) -> tuple[Cell, Cell]:
    """(the families one after the other: sum of times and largest memory, all together)"""
    together = replace(
        config, family=families[0], more_families=tuple(families[1:]), shared_target=True
    )
    first = [cell(together)] if together_first else []
    alone = [cell(replace(config, family=family)) for family in families]
    apart = Cell(sum(one.seconds for one in alone), max(one.mebibytes for one in alone))
    return apart, (first or [cell(together)])[0]


def cell(config: TrainConfig) -> Cell:
    # Forked from a process that has imported everything and computed nothing.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([shared.__name__, session.__name__])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(config, send))
    process.start()
    send.close()
    try:
        return Cell(*receive.recv())
    finally:
        process.join()


def measure(config: TrainConfig, send: Connection) -> None:
    """Body of a cell's process."""
    clocks: list[Meter] = []
    seconds = 0.0

    class MeteredClock(Clock):
        def start(self, elapsed_s: float = 0.0) -> None:
            clocks.append(Meter())

        def tick(self) -> float:
            nonlocal seconds
            seconds = clocks[0].seconds()
            return seconds

    session.Clock = MeteredClock  # type: ignore[misc]
    memory = Meter()
    memory.start()
    with contextlib.redirect_stdout(io.StringIO()):
        run(config)
    send.send((seconds, memory.report()["training_bytes"] / 2**20))


def configured(options: argparse.Namespace, folder: Path) -> TrainConfig:
    write_target(options, folder / "target")
    write_data(options, folder / "data")
    return TrainConfig(
        family="eagle3",
        target=str(folder / "target"),
        data=(str(folder / "data"),),
        out=str(folder / "out"),
        steps=options.steps,
        batch_size=options.rows,
        max_length=options.length,
        held_out=0.0,
        eval_prompts=0,
        resume=False,
        save_every=10 * options.steps,
    )


def write_target(options: argparse.Namespace, folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64,
        max_position_embeddings=options.length,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = WordLevel({f"w{number}": number for number in range(options.vocab)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)


def write_data(options: argparse.Namespace, folder: Path) -> None:
    folder.mkdir()
    size = (4 * options.rows, options.length)
    ids = torch.randint(3, options.vocab, size, generator=torch.Generator().manual_seed(0))
    mask = [int(at >= options.length // 4) for at in range(options.length)]
    rows = [
        {"name": str(number), "input_ids": row, "loss_mask": mask}
        for number, row in enumerate(ids.tolist())
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "part-00000.parquet")
    write_json(folder / "provenance.json", {"target": "random", "temperature": 1.0})


def spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    sys.exit(main())
