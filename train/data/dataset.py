"""The dataset folder of docs/architecture.md ("Data on disk") as sequences to train on and to
evaluate with."""

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

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import tokenizer_difference
from draftsmith.errors import UserError, first_line
from draftsmith.files import is_full, read_json
from draftsmith.prompts.shares import uniform
from draftsmith.train.data.folders import shards_of

REQUIRED = ("input_ids", "loss_mask")


class TokenSequence(NamedTuple):
    """One document, prompt and answer, or a piece of one. `name` groups the sequences that a
    bootstrap draws together."""

    name: str
    input_ids: torch.Tensor  # [L] int64
    loss_mask: torch.Tensor  # [L] bool, True where the target wrote the token and it counts here
    # number of its first token among all of the folders; -1 for a text that is in none
    token_index: int = -1
    folder: int = 0  # number of the data folder among several
    temperature: float | None = None  # that it was written at, in a folder of several


class Sequences:
    """Some pieces of a data folder, read on access; it holds a few numbers per piece.
    `with_prompts`: the loss is over every token, not over the target's own alone. Among those of
    several folders it is number `folder`, whose first token is number `first_token` of all."""

    with_prompts = False
    folder = first_token = 0

    def __init__(self, rows: Any, indices: np.ndarray, pieces: Pieces):
        self.rows = rows.with_format("numpy", columns=list(REQUIRED))
        self.indices = indices
        self.pieces = pieces
        self.lengths: np.ndarray = pieces.length[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, at: int) -> TokenSequence:
        if at >= len(self):
            raise IndexError(at)
        piece, pieces = int(self.indices[at]), self.pieces
        row = self.rows[int(pieces.row[piece])]
        part = slice(int(pieces.begin[piece]), int(pieces.begin[piece] + pieces.length[piece]))
        loss_mask = torch.from_numpy(row["loss_mask"][part].astype(bool))
        loss_mask |= self.with_prompts
        loss_mask[: pieces.fresh[piece]] = False
        input_ids = torch.from_numpy(row["input_ids"][part].astype(np.int64))
        return TokenSequence(
            pieces.names[piece],
            input_ids,
            loss_mask,
            self.first_token + int(pieces.token_index[piece]),
            self.folder,
            pieces.temperatures[piece],
        )

    def first(self, count: int) -> list[TokenSequence]:
        return [self[at] for at in range(min(count, len(self)))]


@dataclass(frozen=True)
class Corpus:
    """A data folder read whole. `long` texts have more tokens than the limit, `empty` pieces
    nothing to learn from."""

    train: Sequences
    held_out: Sequences
    provenance: dict[str, Any]
    long: int
    empty: int

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """[V] how often the target wrote each token in the training part, cut or not: what a draft
        vocabulary is chosen by."""
        wanted = np.zeros(len(self.train.rows), dtype=bool)
        wanted[self.train.pieces.row[self.train.indices]] = True
        counts = np.zeros(vocab_size, dtype=np.int64)
        begin = 0
        for table in self.train.rows.with_format("arrow").iter(batch_size=1000):
            ids, mask = Lists(table["input_ids"]), Lists(table["loss_mask"])
            of_wanted = np.repeat(wanted[begin : begin + len(ids.lengths)], ids.lengths)
            counts += np.bincount(
                ids.values[of_wanted & mask.values.astype(bool)], minlength=vocab_size
            )
            begin += len(ids.lengths)
        return torch.from_numpy(counts)


def read_corpus(
    folder: str | Path,
    *,
    max_length: int,
    vocab_size: int,
    held_out_share: float,
    split_long: bool = False,
) -> Corpus:
    """Opens and checks the folder. `vocab_size` is the target's; ids beyond it mean another
    tokenizer."""
    folder = Path(folder)
    rows = open_rows(folder)
    pieces = Pieces(rows, max_length, split=split_long)
    useful = (pieces.trained > 0).nonzero()[0]
    if not len(useful):
        raise UserError(
            f"data {str(folder)!r} holds no token to learn from in the first {max_length} tokens "
            f"of its {len(rows)} rows; raise "
            "max_length or generate answers for more prompts"
        )
    _check_ids(pieces, vocab_size, folder)
    chosen = held_out(
        [pieces.names[at] for at in useful], [pieces.splits[at] for at in useful], held_out_share
    )
    return Corpus(
        train=Sequences(rows, useful[~chosen], pieces),
        held_out=Sequences(rows, useful[chosen], pieces),
        provenance=provenance_of(folder),
        long=pieces.num_long,
        empty=len(pieces.length) - len(useful),
    )


def provenance_of(folder: Path) -> dict[str, Any]:
    """Record of how the folder was written; {} where it has none."""
    path = folder / "provenance.json"
    return read_json(path, "data provenance") if path.is_file() else {}


def held_out(names: Sequence[str], splits: Sequence[str | None], share: float) -> np.ndarray:
    """[N] bool: the split written by `generate` where there is one, else a hash of the names. Share
    1 holds all out."""
    if share >= 1.0 or share <= 0.0:
        return np.full(len(names), share >= 1.0)
    if "held-out" in splits:
        chosen = np.array([split == "held-out" for split in splits])
    else:
        # Not the draw without a name, by which `generate --split` has chosen already.
        hashes = np.array([uniform(name, "held out of training") for name in names])
        # A small set may have no row below the share; the lowest hash is as arbitrary and as
        # stable.
        chosen = hashes <= max(share, hashes.min())
    # A single document cannot be both; training on it is the lesser evil.
    return chosen if not chosen.all() else np.zeros(len(names), dtype=bool)


def check_tokenizer(provenance: dict[str, Any], target: Target, folder: str | Path) -> None:
    """The tokens must mean the same to the target that is trained for and to the one that wrote
    them."""
    if difference := tokenizer_difference(provenance, target.tokenizer()):
        raise UserError(
            f"data {str(folder)!r} was written with the tokenizer of "
            f"{provenance.get('target')!r}, not with that of target "
            f"{target.name!r} ({difference}); generate it again"
        )


def open_rows(folder: Path) -> Any:
    """The folder's rows as a `datasets.Dataset` of the columns that training reads."""
    rows = load_rows(folder)
    return rows.select_columns(
        [name for name in (*REQUIRED, "name", "split", "temperature") if name in rows.column_names]
    )


def load_rows(folder: Path) -> Any:
    """Rows with every column."""
    import datasets

    shards = shards_of(folder)
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset("parquet", data_files=shards, split="train")
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        cause = error.__cause__ or error
        if is_full(cause):
            raise UserError(
                f"data {str(folder)!r} finds no room in {str(datasets.config.HF_DATASETS_CACHE)!r} "
                f"({first_line(cause)}); make some, or set HF_DATASETS_CACHE to another folder"
            ) from error
        raise UserError(
            f"data {str(folder)!r} cannot be read as Parquet ({first_line(cause)}); generate it "
            "again"
        ) from error
    missing = [name for name in REQUIRED if name not in rows.column_names]
    if missing:
        raise UserError(
            f"data {str(folder)!r} has no column {missing[0]!r}; it needs {' and '.join(REQUIRED)}"
        )
    return rows


def _check_ids(pieces: Pieces, vocab_size: int, folder: Path) -> None:
    if pieces.highest >= vocab_size or pieces.lowest < 0:
        wrong = pieces.highest if pieces.highest >= vocab_size else pieces.lowest
        raise UserError(
            f"data {str(folder)!r} holds token id {wrong}, outside the target's vocabulary of "
            f"{vocab_size}; "
            "generate it with this target"
        )


# A piece of a split text begins with so much of the one before it, as context.
CONTEXT_SHARE = 4


class Lists:
    """A column of lists as numpy."""

    def __init__(self, column: pa.ChunkedArray):
        self.lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
        self.starts = self.lengths.cumsum() - self.lengths
        self.values = pc.list_flatten(column).to_numpy()

    def row(self, at: int) -> np.ndarray:
        return self.values[self.starts[at] : self.starts[at] + self.lengths[at]]


class Pieces:
    """Gathered from the columns as they lie on disk. A text of more than `max_length` tokens is one
    piece, cut, or with `split` several, each of which trains the tokens that the ones before it did
    not. Arrays have an entry a piece."""

    def __init__(self, rows: Any, max_length: int, *, split: bool = False):
        self.max_length, self.split = max_length, split
        self.names: list[str] = []
        self.splits: list[str | None] = []
        self.temperatures: list[float | None] = []
        self.lowest, self.highest, self.num_long, self.num_tokens = 0, -1, 0, 0
        found: list[np.ndarray] = [np.zeros((0, 6), dtype=np.int64)]
        first_row = 0
        for table in rows.with_format("arrow").iter(batch_size=1000):
            found.append(self._of(table, first_row))
            first_row += len(table)
        # row: of the folder. begin: position of its first token in the text. fresh: tokens of it
        # that only give context. trained: tokens that count. token_index: number of its first token
        # among all tokens of the folder.
        columns = np.concatenate(found).T
        self.row, self.begin, self.length, self.fresh, self.trained, self.token_index = columns

    def _of(self, table: pa.Table, first_row: int) -> np.ndarray:
        ids, mask = Lists(table["input_ids"]), Lists(table["loss_mask"])
        _check_same_lengths(ids.lengths, mask.lengths, first_row)
        if len(ids.values):
            self.lowest = min(self.lowest, int(ids.values.min()))
            self.highest = max(self.highest, int(ids.values.max()))
        self.num_long += int((ids.lengths > self.max_length).sum())
        before = np.concatenate([[0], mask.values.astype(bool).cumsum()])
        known, splits, temperatures = (
            table[name].to_pylist() if name in table.column_names else [None] * len(table)
            for name in ("name", "split", "temperature")
        )
        found = []
        for at, size in enumerate(ids.lengths.tolist()):
            start = int(ids.starts[at])
            for begin, end, fresh in self._cuts(size):
                # The first token of a text has nothing to be predicted from.
                counted = before[start + end] - before[start + min(begin + max(fresh, 1), end)]
                found.append(
                    (
                        first_row + at,
                        begin,
                        end - begin,
                        fresh,
                        counted,
                        self.num_tokens + start + begin,
                    )
                )
                self.names.append(known[at] or _prompt_name(ids.row(at), mask.row(at)))
                self.splits.append(splits[at])
                self.temperatures.append(temperatures[at])
        self.num_tokens += len(ids.values)
        return np.array(found, dtype=np.int64).reshape(-1, 6)

    def _cuts(self, size: int) -> list[tuple[int, int, int]]:
        """(begin, end, tokens that are context only) of each piece of a text."""
        if size <= self.max_length or not self.split:
            return [(0, min(size, self.max_length), 0)]
        context = min(max(self.max_length // CONTEXT_SHARE, 1), self.max_length - 1)
        begins = range(0, size - context, self.max_length - context)
        return [
            (begin, min(begin + self.max_length, size), context if begin else 0) for begin in begins
        ]


def _check_same_lengths(ids: np.ndarray, mask: np.ndarray, first_row: int) -> None:
    if (ids != mask).any():
        at = int((ids != mask).argmax())
        raise UserError(
            f"row {first_row + at} of the data has {ids[at]} input_ids but {mask[at]} loss_mask; "
            "generate it again"
        )


def _prompt_name(ids: np.ndarray, mask: np.ndarray) -> str:
    """Name of a row that has none: answers to one prompt share theirs."""
    answer = int(mask.astype(bool).argmax()) or len(ids)
    return hashlib.sha256(ids[:answer].astype(np.int64).tobytes()).hexdigest()
