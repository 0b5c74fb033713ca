"""Texts of a data folder as pieces to train on: the properties of all of them that batching needs
before any is read."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from draftsmith.errors import UserError

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
