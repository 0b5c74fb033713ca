"""The dataset folder of docs/architecture.md ("Data on disk") as sequences to train on and to evaluate with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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


class Sequences(torch.utils.data.Dataset):
    """Some rows of a data folder, read when they are wanted: what is held is a number a row."""

    def __init__(self, rows: Any, indices: np.ndarray, scan: _Scan, max_length: int):
        self.rows = rows.with_format("numpy", columns=list(REQUIRED))
        self.indices = indices
        self.lengths: np.ndarray = scan.lengths[indices]
        self.names = [scan.names[at] for at in indices]
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, at: int) -> TokenSequence:
        if at >= len(self):
            raise IndexError(at)
        row = self.rows[int(self.indices[at])]
        input_ids = torch.from_numpy(row["input_ids"][: self.max_length].astype(np.int64))
        return TokenSequence(self.names[at], input_ids, torch.from_numpy(row["loss_mask"][: self.max_length].astype(bool)))

    def first(self, count: int) -> list[TokenSequence]:
        return [self[at] for at in range(min(count, len(self)))]


@dataclass(frozen=True)
class Corpus:
    """Everything read from a data folder. `cut` sequences were longer than the limit, `empty` had nothing to learn from."""

    train: Sequences
    held_out: Sequences
    provenance: dict[str, Any]
    cut: int
    empty: int

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """[V] how often the target wrote each token in the training part, cut or not: what a draft vocabulary is chosen by."""
        wanted = np.zeros(len(self.train.rows), dtype=bool)
        wanted[self.train.indices] = True
        counts = np.zeros(vocab_size, dtype=np.int64)
        begin = 0
        for table in self.train.rows.with_format("arrow").iter(batch_size=1000):
            ids, mask = _Lists(table["input_ids"]), _Lists(table["loss_mask"])
            of_wanted = np.repeat(wanted[begin : begin + len(ids.lengths)], ids.lengths)
            counts += np.bincount(ids.values[of_wanted & mask.values.astype(bool)], minlength=vocab_size)
            begin += len(ids.lengths)
        return torch.from_numpy(counts)


def read_corpus(folder: str | Path, *, max_length: int, vocab_size: int, held_out_share: float) -> Corpus:
    """Opens and checks the folder. `vocab_size` is the target's; ids beyond it mean another tokenizer."""
    folder = Path(folder)
    provenance = read_json(folder / "provenance.json", "data provenance") if (folder / "provenance.json").is_file() else {}
    rows = open_rows(folder)
    scan = _Scan(rows, max_length)
    useful = (scan.trained > 0).nonzero()[0]
    if not len(useful):
        raise UserError(
            f"data {str(folder)!r} holds no token to learn from in {len(rows)} rows; generate answers for more prompts"
        )
    _check_ids(scan, vocab_size, folder)
    chosen = held_out([scan.names[at] for at in useful], [scan.splits[at] for at in useful], held_out_share)
    return Corpus(
        train=Sequences(rows, useful[~chosen], scan, max_length),
        held_out=Sequences(rows, useful[chosen], scan, max_length),
        provenance=provenance,
        cut=scan.cut,
        empty=len(rows) - len(useful),
    )


def held_out(names: Sequence[str], splits: Sequence[str | None], share: float) -> np.ndarray:
    """[N] bool: the split written by `generate` where there is one, else a hash of the names. Share 1 holds all out."""
    if share >= 1.0 or share <= 0.0:
        return np.full(len(names), share >= 1.0)
    if "held-out" in splits:
        chosen = np.array([split == "held-out" for split in splits])
    else:
        hashes = np.array([_hash(name) for name in names])
        # A small set may have nobody below the share; the lowest hash is as arbitrary and as stable.
        chosen = hashes <= max(share, hashes.min())
    # A single document cannot be both; training on it is the lesser evil.
    return chosen if not chosen.all() else np.zeros(len(names), dtype=bool)


def check_tokenizer(provenance: dict[str, Any], tokenizer_hash: str | None, folder: str | Path) -> None:
    """The tokens must mean the same to the target that is trained for and to the one that wrote them."""
    written_by = provenance.get("tokenizer_hash")
    if written_by and tokenizer_hash and written_by != tokenizer_hash:
        raise UserError(
            f"data {str(folder)!r} was written with the tokenizer of {provenance.get('target')!r}, not with this target's; "
            "generate it again"
        )


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


class _Scan:
    """What must be known of every row before any is read: gathered from the columns as they lie on disk."""

    def __init__(self, rows: Any, max_length: int):
        names: list[str] = []
        splits: list[str | None] = []
        lengths, trained = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        self.lowest, self.highest, self.cut = 0, -1, 0
        for table in rows.with_format("arrow").iter(batch_size=1000):
            ids, mask = _Lists(table["input_ids"]), _Lists(table["loss_mask"])
            _check_same_lengths(ids.lengths, mask.lengths, sum(map(len, lengths)))
            kept = np.minimum(ids.lengths, max_length)
            before = np.concatenate([[0], mask.values.astype(bool).cumsum()])
            ends = ids.starts + kept
            # The first token of a text has nothing to be predicted from.
            trained.append(before[ends] - before[np.minimum(ids.starts + 1, ends)])
            lengths.append(kept)
            self.cut += int((ids.lengths > max_length).sum())
            if len(ids.values):
                self.lowest = min(self.lowest, int(ids.values.min()))
                self.highest = max(self.highest, int(ids.values.max()))
            known = table["name"].to_pylist() if "name" in table.column_names else [None] * len(kept)
            names += [name or _prompt_name(ids.row(at), mask.row(at)) for at, name in enumerate(known)]
            splits += table["split"].to_pylist() if "split" in table.column_names else [None] * len(kept)
        self.names, self.splits = names, splits
        self.lengths, self.trained = np.concatenate(lengths), np.concatenate(trained)


class _Lists:
    """A column of lists as numpy."""

    def __init__(self, column: pa.ChunkedArray):
        self.lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
        self.starts = self.lengths.cumsum() - self.lengths
        self.values = pc.list_flatten(column).to_numpy()

    def row(self, at: int) -> np.ndarray:
        return self.values[self.starts[at] : self.starts[at] + self.lengths[at]]


def _check_same_lengths(ids: np.ndarray, mask: np.ndarray, first_row: int) -> None:
    if (ids != mask).any():
        at = int((ids != mask).argmax())
        raise UserError(f"row {first_row + at} of the data has {ids[at]} input_ids but {mask[at]} loss_mask; generate it again")


def _prompt_name(ids: np.ndarray, mask: np.ndarray) -> str:
    """For a row without a name: answers to one prompt share theirs."""
    answer = int(mask.astype(bool).argmax()) or len(ids)
    return hashlib.sha256(ids[:answer].astype(np.int64).tobytes()).hexdigest()


def _check_ids(scan: _Scan, vocab_size: int, folder: Path) -> None:
    if scan.highest >= vocab_size or scan.lowest < 0:
        wrong = scan.highest if scan.highest >= vocab_size else scan.lowest
        raise UserError(
            f"data {str(folder)!r} holds token id {wrong}, outside the target's vocabulary of {vocab_size}; "
            "generate it with this target"
        )


def _hash(name: str) -> float:
    """In [0, 1), the same on every machine. Salted: `generate --split` has chosen by the bare name's hash already."""
    return int(hashlib.sha256(f"held out of training: {name}".encode()).hexdigest()[:12], 16) / 16**12
