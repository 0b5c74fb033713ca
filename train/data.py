"""The dataset folder of docs/architecture.md ("Data on disk") as sequences to train on and to evaluate with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data

from draftsmith.errors import UserError
from draftsmith.files import read_json

REQUIRED = ("input_ids", "loss_mask")


class TokenSequence(NamedTuple):
    """One document: prompt and answer. `name` groups the sequences that a bootstrap draws together."""

    name: str
    input_ids: torch.Tensor  # [L] int64
    loss_mask: torch.Tensor  # [L] bool, True where the target wrote the token


@dataclass(frozen=True)
class Corpus:
    """Everything read from a data folder. `cut` sequences were longer than the limit, `empty` had nothing to learn from."""

    train: list[TokenSequence]
    held_out: list[TokenSequence]
    provenance: dict[str, Any]
    cut: int
    empty: int

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """[V] how often the target wrote each token in the training part: what a draft vocabulary is chosen by."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for sequence in self.train:
            counts += torch.bincount(sequence.input_ids[sequence.loss_mask], minlength=vocab_size)
        return counts


class TokenBatch(NamedTuple):
    """Right padded to the longest row."""

    input_ids: torch.Tensor  # [B, L] int64
    attention_mask: torch.Tensor  # [B, L] int64, 1 for real tokens
    loss_mask: torch.Tensor  # [B, L] bool


def read_corpus(folder: str | Path, *, max_length: int, vocab_size: int, held_out_share: float) -> Corpus:
    """Reads and checks the folder. `vocab_size` is the target's; ids beyond it mean another tokenizer."""
    folder = Path(folder)
    provenance = read_json(folder / "provenance.json", "data provenance") if (folder / "provenance.json").is_file() else {}
    rows = open_rows(folder)
    sequences, splits, cut, empty = [], [], 0, 0
    for number, row in enumerate(rows):
        cut += len(row["input_ids"]) > max_length
        sequence = _sequence(row, number, max_length)
        if not bool(sequence.loss_mask[1:].any()):
            empty += 1
            continue
        sequences.append(sequence)
        splits.append(row.get("split"))
    if not sequences:
        raise UserError(
            f"data {str(folder)!r} holds no token to learn from in {len(rows)} rows; generate answers for more prompts"
        )
    _check_ids(sequences, vocab_size, folder)
    train, held_out = split(sequences, splits, held_out_share)
    return Corpus(train=train, held_out=held_out, provenance=provenance, cut=cut, empty=empty)


def split(
    sequences: Sequence[TokenSequence], splits: Sequence[str | None], share: float
) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """The split written by `generate` where there is one, else a hash of the document's name. Share 1 reads all as held out."""
    if share >= 1.0:
        return [], list(sequences)
    if share <= 0.0:
        return list(sequences), []
    if "held-out" in splits:
        chosen = [name == "held-out" for name in splits]
    else:
        hashes = [_hash(sequence.name) for sequence in sequences]
        # A small set may have nobody below the share; the lowest hash is as arbitrary and as stable.
        threshold = max(share, min(hashes) + 1e-12)
        chosen = [value < threshold for value in hashes]
    train = [sequence for sequence, out in zip(sequences, chosen, strict=True) if not out]
    held_out = [sequence for sequence, out in zip(sequences, chosen, strict=True) if out]
    # A single document cannot be both; training on it is the lesser evil.
    return (train, held_out) if train else (held_out, [])


def check_tokenizer(provenance: dict[str, Any], tokenizer_hash: str | None, folder: str | Path) -> None:
    """The tokens must mean the same to the target that is trained for and to the one that wrote them."""
    written_by = provenance.get("tokenizer_hash")
    if written_by and tokenizer_hash and written_by != tokenizer_hash:
        raise UserError(
            f"data {str(folder)!r} was written with the tokenizer of {provenance.get('target')!r}, not with this target's; "
            "generate it again"
        )


def collate(sequences: Sequence[TokenSequence]) -> TokenBatch:
    length = max(len(sequence.input_ids) for sequence in sequences)
    input_ids = torch.zeros(len(sequences), length, dtype=torch.int64)
    attention_mask = torch.zeros(len(sequences), length, dtype=torch.int64)
    loss_mask = torch.zeros(len(sequences), length, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        size = len(sequence.input_ids)
        input_ids[row, :size] = sequence.input_ids
        attention_mask[row, :size] = 1
        loss_mask[row, :size] = sequence.loss_mask
    return TokenBatch(input_ids, attention_mask, loss_mask)


class BatchPlan(torch.utils.data.Sampler[list[int]]):
    """Every batch of a run on one of `world_size` processes: a pure function of lengths and seed.

    Epochs follow each other in one stream, of which each process takes every `world_size`-th batch, so the data position is
    the number of batches taken and a resume skips exactly those. Batches hold sequences of similar length.
    """

    POOL = 32  # batches sorted together: enough to limit padding, few enough to keep the order random

    def __init__(self, lengths: Sequence[int], *, batch_size: int, seed: int, num_batches: int, rank: int, world_size: int):
        self.lengths = np.asarray(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.num_batches = num_batches
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        given = 0
        for number, batch in enumerate(self._stream()):
            if number % self.world_size != self.rank:
                continue
            if given == self.num_batches:
                return
            given += 1
            yield batch

    def _stream(self) -> Iterator[list[int]]:
        epoch = 0
        while True:
            yield from self._epoch(np.random.default_rng([self.seed, epoch]))
            epoch += 1

    def _epoch(self, random: np.random.Generator) -> list[list[int]]:
        order = random.permutation(len(self.lengths))
        batches = []
        for start in range(0, len(order), self.batch_size * self.POOL):
            pool = order[start : start + self.batch_size * self.POOL]
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            batches += [pool[at : at + self.batch_size].tolist() for at in range(0, len(pool), self.batch_size)]
        return [batches[at] for at in random.permutation(len(batches))]


def batches_per_epoch(num_sequences: int, batch_size: int) -> int:
    return -(-num_sequences // batch_size)


def open_rows(folder: Path) -> Any:
    """The folder's rows as a `datasets.Dataset` of the columns that training reads."""
    import datasets

    if not folder.is_dir():
        raise UserError(f"data {str(folder)!r} is not a folder; give one written by `draftsmith generate`")
    shards = sorted(str(path) for path in folder.glob("part-*.parquet"))
    if not shards:
        raise UserError(f"data {str(folder)!r} holds no part-*.parquet file; give a folder written by `draftsmith generate`")
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset("parquet", data_files=shards, split="train")
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        raise UserError(f"data {str(folder)!r} cannot be read as Parquet ({error}); generate it again") from error
    missing = [name for name in REQUIRED if name not in rows.column_names]
    if missing:
        raise UserError(f"data {str(folder)!r} has no column {missing[0]!r}; it needs {' and '.join(REQUIRED)}")
    kept = [name for name in (*REQUIRED, "name", "split") if name in rows.column_names]
    return rows.select_columns(kept)


def _sequence(row: dict[str, Any], number: int, max_length: int) -> TokenSequence:
    if len(row["input_ids"]) != len(row["loss_mask"]):
        raise UserError(
            f"row {number} of the data has {len(row['input_ids'])} input_ids but {len(row['loss_mask'])} loss_mask; "
            "generate it again"
        )
    input_ids = torch.tensor(row["input_ids"][:max_length], dtype=torch.int64)
    loss_mask = torch.tensor(row["loss_mask"][:max_length], dtype=torch.bool)
    name = row.get("name")
    if not name:
        answer = int(loss_mask.int().argmax()) or len(input_ids)
        name = hashlib.sha256(input_ids[:answer].numpy().tobytes()).hexdigest()
    return TokenSequence(name, input_ids, loss_mask)


def _check_ids(sequences: Sequence[TokenSequence], vocab_size: int, folder: Path) -> None:
    highest = max(int(sequence.input_ids.max()) for sequence in sequences)
    lowest = min(int(sequence.input_ids.min()) for sequence in sequences)
    if highest >= vocab_size or lowest < 0:
        wrong = highest if highest >= vocab_size else lowest
        raise UserError(
            f"data {str(folder)!r} holds token id {wrong}, outside the target's vocabulary of {vocab_size}; "
            "generate it with this target"
        )


def _hash(name: str) -> float:
    """In [0, 1), the same on every machine. Salted: `generate --split` has chosen by the bare name's hash already."""
    return int(hashlib.sha256(f"held out of training: {name}".encode()).hexdigest()[:12], 16) / 16**12
