"""Hidden states of the target at every token of a dataset, stored beside it
(`train/data/stored_taps.py`). Resumes by whole shards."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import torch

from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate.answers import AnswerFolder
from draftsmith.drafters.options import default_taps
from draftsmith.drafters.target.taps import check_taps
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.train.data.stored_taps import StatesOf, TapLayout, tap_file, writing

PROBE_TOKENS = 256  # a pass whose time stands for all
# Of a pass, at most. glibc maps tensors above 32 MiB anew each time, which costs page faults.
PASS_TOKENS = 4096


class Cost(NamedTuple):
    tokens: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.bytes / 1e9:.2f} GB and {self.seconds / 60:.1f} minutes for {self.tokens} "
            "tokens"
        )


def layout_of(config: GenerateOptions, target: Target) -> TapLayout:
    taps = config.taps or default_taps(target.num_layers)
    if min(taps) < 0 or len(set(taps)) < len(taps):
        raise UserError(
            f"--taps are {' '.join(map(str, taps))}; give raw layer ids from 0 on, each once"
        )
    check_taps(taps, target.num_layers)
    return TapLayout(taps, target.hidden_size, config.store_taps or "bf16")


def check_cost(folder: str | Path, target: Target, layout: TapLayout, tokens: int) -> Cost:
    """Prints the most that storing will take, and raises a `UserError` where the disk has less."""
    cost = Cost(tokens, tokens * layout.bytes_a_token, tokens * seconds_a_token(target, layout))
    print(
        f"taps {', '.join(map(str, layout.taps))} and final states in {layout.precision} take at "
        f"most {cost}"
    )
    stored = sum(path.stat().st_size for path in Path(folder).glob("taps-*.safetensors"))
    free = shutil.disk_usage(_existing(Path(folder))).free + stored
    if cost.bytes > free:
        raise UserError(
            f"stored taps take up to {cost.bytes / 1e9:.2f} GB and the disk of {str(folder)!r} "
            f"has {free / 1e9:.2f} GB free; use "
            "--store-taps fp8, fewer --taps, a smaller --count or --max-tokens, or another disk"
        )
    return cost


def seconds_a_token(target: Target, layout: TapLayout) -> float:
    """Seconds per token of the target's pass; writing is short beside it."""
    ids = torch.zeros(
        1, min(PROBE_TOKENS, target.max_positions), dtype=torch.int64, device=target.device
    )
    times_s = []
    for _ in range(2):  # the first pays for what is set up once
        begun_s = time.perf_counter()
        target.states(ids, torch.ones_like(ids), layout.taps)[1].cpu()
        times_s.append(time.perf_counter() - begun_s)
    return min(times_s) / ids.shape[1]


def store_taps(
    config: GenerateOptions,
    target: Target,
    layout: TapLayout,
    folder: AnswerFolder,
    shards: Sequence[int],
) -> None:
    """States of the answers of some shards."""
    total = sum(len(folder.prompts_of(shard)) for shard in shards)
    progress = Progress("store taps", total, unit="texts")
    done = 0
    for shard in shards:
        part = folder.part(shard)
        if not _is_stored(part, layout, target):
            with folder.writing():
                _store_shard(part, layout, target, config.batch)
        done += len(folder.prompts_of(shard))
        progress.update(done)
    progress.close()


@torch.no_grad()
def _store_shard(part: Path, layout: TapLayout, target: Target, batch: int) -> None:
    texts = [
        torch.tensor(ids)
        for ids in pq.read_table(part, columns=["input_ids"])["input_ids"].to_pylist()
    ]
    lengths = [len(text) for text in texts]
    with writing(part, layout, lengths, revision=target.revision) as writer:
        for rows in passes(lengths, batch):
            ids = torch.nn.utils.rnn.pad_sequence(
                [texts[row] for row in rows], batch_first=True
            ).to(target.device)
            mask = (
                torch.arange(ids.shape[1]) < torch.tensor([lengths[row] for row in rows])[:, None]
            )
            taps, final = target.states(ids, mask.long().to(target.device), layout.taps)
            for at, row in enumerate(rows):
                writer.put(row, taps[at, : lengths[row]], final[at, : lengths[row]])


def passes(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Numbers of the texts, shortest first: at most `most` texts and, padded to the longest,
    `PASS_TOKENS` tokens at once; a longer text alone."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and (len(rows) == most or (len(rows) + 1) * lengths[row] > PASS_TOKENS):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _is_stored(part: Path, layout: TapLayout, target: Target) -> bool:
    path = tap_file(part)
    if not path.is_file():
        return False
    found = StatesOf(path)
    if not found.is_of(part, revision=target.revision) or (found.taps, found.precision) != (
        layout.taps,
        layout.precision,
    ):
        raise UserError(
            f"stored taps {str(path)!r} are {found.taps} in {found.precision}, of this target or "
            "another; delete them to store "
            f"{layout.taps} in {layout.precision}"
        )
    return True


def _existing(folder: Path) -> Path:
    """Folder, or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
