"""Batches of sequences: padding, packing, and the order of a whole run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.utils.data
from torch.nn.utils.rnn import pad_sequence

from draftsmith.drafters.interface import TextBatch
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.data.folders import FolderPart, epoch_order

Batch = list[list[int]]  # the sequences of each row


def collate(sequences: Sequence[TokenSequence]) -> TextBatch:
    """Batch with a sequence per row."""
    return pack([[sequence] for sequence in sequences])


class TrainedText(NamedTuple):
    """One text of a batch, of n tokens."""

    input_ids: torch.Tensor  # [n] int64
    weights: torch.Tensor  # [n] float32
    token_index: torch.Tensor | None = None  # [n] int64, as in `TextBatch`


def pack(rows: Sequence[Sequence[TokenSequence]]) -> TextBatch:
    """Batch with the sequences of each row one after another."""
    return packed(
        [
            [TrainedText(one.input_ids, weights_of(one), index_of(one)) for one in row]
            for row in rows
        ]
    )


def packed(rows: Sequence[Sequence[TrainedText]]) -> TextBatch:
    """Batch with the texts of each row one after another; all have a `token_index`, or none."""
    ids = rows_of([[one.input_ids for one in row] for row in rows])
    segments = [
        torch.cat([torch.full_like(one.input_ids, number) for number, one in enumerate(row)])
        for row in rows
    ]
    is_packed = any(len(row) > 1 for row in rows)
    index = [[one.token_index for one in row if one.token_index is not None] for row in rows]
    return TextBatch(
        input_ids=padded(ids),
        attention_mask=mask_of(ids),
        weights=padded(rows_of([[one.weights for one in row] for row in rows])),
        segments=padded(segments, -1) if is_packed else None,
        token_index=padded(rows_of(index), -1) if all(index) else None,
    )


def rows_of(rows: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Join what belongs to the texts of each row."""
    return [torch.cat(list(row)) for row in rows]


def weights_of(sequence: TokenSequence) -> torch.Tensor:
    """[L] float32, 1 where a token is trained. The first token of a text has no state to be
    predicted from."""
    weights = sequence.loss_mask.float()
    weights[:1] = 0
    return weights


def index_of(sequence: TokenSequence) -> torch.Tensor:
    """[L] int64, number of each token among all of the folder's; -1 for a text that is in none."""
    first, length = sequence.token_index, len(sequence.input_ids)
    return torch.full((length,), -1) if first < 0 else torch.arange(first, first + length)


def padded(rows: Sequence[torch.Tensor], value: float = 0) -> torch.Tensor:
    """[B, L] of rows of any lengths, filled up on the right with `value`."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


def mask_of(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B, L] int64, 1 where `padded` has tokens of the rows."""
    return padded([torch.ones_like(row, dtype=torch.int64) for row in rows])


class BatchPlan(torch.utils.data.Sampler[Batch]):
    """Every batch of a run on one of `world_size` processes: a pure function of lengths and seed.

    Epochs follow each other in one stream, of which each process takes every `world_size`-th batch,
    so the data position is the number of batches taken and a resume skips exactly those. A run
    takes `num_batches`, which is set once the length of the first epoch is known. A batch
    holds `batch_size` rows: sequences of similar length, one per row, or with `row_length` as many
    whole ones per row as fit in so many tokens. `parts` are the folders that the sequences are of,
    where they have weights.
    """

    # batches sorted together: enough to limit padding, few enough to keep the order random
    POOL = 32
    FULL_ROWS = 64  # rows that are filled together, for the same reasons

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int,
        seed: int,
        num_batches: int = 0,
        rank: int = 0,
        world_size: int = 1,
        row_length: int | None = None,
        parts: Sequence[FolderPart] = (),
    ):
        self.lengths = np.asarray(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.num_batches = num_batches
        self.rank = rank
        self.world_size = world_size
        self.row_length = row_length
        self.parts = parts or [FolderPart(len(lengths))]

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        own = itertools.islice(self._stream(), self.rank, None, self.world_size)
        return itertools.islice(own, self.num_batches)

    def _stream(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            yield from self.epoch(epoch)

    def epoch(self, number: int) -> list[Batch]:
        """Batches of an epoch, of all processes."""
        random = np.random.default_rng([self.seed, number])
        order = epoch_order(self.parts, random, seed=self.seed, epoch=number)
        batches = (
            self._sorted(order)
            if self.row_length is None
            else self._packed(order, self.row_length, random)
        )
        return [batches[at] for at in random.permutation(len(batches))]

    def _sorted(self, order: np.ndarray) -> list[Batch]:
        batches = []
        for start in range(0, len(order), self.batch_size * self.POOL):
            pool = order[start : start + self.batch_size * self.POOL]
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            batches += [
                pool[at : at + self.batch_size, None].tolist()
                for at in range(0, len(pool), self.batch_size)
            ]
        return batches

    def _packed(
        self, order: np.ndarray, row_length: int, random: np.random.Generator
    ) -> list[Batch]:
        pools = self.lengths[order].cumsum() // (row_length * self.FULL_ROWS)
        edges = np.searchsorted(pools, np.arange(pools[-1] + 2))
        rows = [
            row
            for begin, end in itertools.pairwise(edges)
            for row in fill(order[begin:end], self.lengths, row_length)
        ]
        rows = [rows[at] for at in random.permutation(len(rows))]
        return [rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)]


def fill(pool: np.ndarray, lengths: np.ndarray, row_length: int) -> Batch:
    """Rows of at most `row_length` tokens that hold each sequence of the pool: longest first, into
    the first row with room."""
    rows: Batch = []
    room = np.zeros(len(pool), dtype=np.int64)
    for at in pool[np.argsort(-lengths[pool], kind="stable")].tolist():
        fits = room[: len(rows)] >= lengths[at]
        row = int(fits.argmax()) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            room[row] = row_length
        rows[row].append(at)
        room[row] -= lengths[at]
    return rows


def rows_as_long_as_the_longest(lengths: Sequence[int]) -> Batch:
    """Rows that hold each text of a batch, none of more tokens than its longest text. Texts of one
    length keep a row each, in order."""
    rows = fill(np.arange(len(lengths)), np.asarray(lengths), max(lengths))
    return sorted(sorted(row) for row in rows)
