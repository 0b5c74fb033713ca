"""Batches of sequences: padding, packing, and the order of a whole run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.utils.data

from draftsmith.train.data.dataset import TokenSequence

Batch = list[list[int]]  # the sequences of each row


class TokenBatch(NamedTuple):
    """Right padded to the longest row."""

    input_ids: torch.Tensor  # [B, L] int64
    attention_mask: torch.Tensor  # [B, L] int64, 1 for real tokens
    loss_mask: torch.Tensor  # [B, L] bool
    # [B, L] int64, see drafters/target/segments.py; None when every row is one text
    segments: torch.Tensor | None
    # [B, L] int64, number of the token among all of the folder's; -1 where it is in none
    places: torch.Tensor


def collate(sequences: Sequence[TokenSequence]) -> TokenBatch:
    return pack([[sequence] for sequence in sequences])


def pack(rows: Sequence[Sequence[TokenSequence]]) -> TokenBatch:
    """The sequences of each row one after another."""
    shape = len(rows), max(sum(len(sequence.input_ids) for sequence in row) for row in rows)
    input_ids, attention_mask = (
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
    )
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    segments, places = torch.full(shape, -1), torch.full(shape, -1)
    for index, row in enumerate(rows):
        begin = 0
        for number, sequence in enumerate(row):
            end = begin + len(sequence.input_ids)
            input_ids[index, begin:end] = sequence.input_ids
            attention_mask[index, begin:end] = 1
            # The first token of a text has no state to be predicted from.
            loss_mask[index, begin + 1 : end] = sequence.loss_mask[1:]
            segments[index, begin:end] = number
            if sequence.place >= 0:
                places[index, begin:end] = torch.arange(
                    sequence.place, sequence.place + end - begin
                )
            begin = end
    is_packed = any(len(row) > 1 for row in rows)
    return TokenBatch(input_ids, attention_mask, loss_mask, segments if is_packed else None, places)


class BatchPlan(torch.utils.data.Sampler[Batch]):
    """Every batch of a run on one of `world_size` processes: a pure function of lengths and seed.

    Epochs follow each other in one stream, of which each process takes every `world_size`-th batch,
    so the data position is the number of batches taken and a resume skips exactly those. A batch
    holds `batch_size` rows: sequences of similar length, one a row, or with `row_length` as many
    whole ones a row as fit in so many tokens.
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
        num_batches: int,
        rank: int,
        world_size: int,
        row_length: int | None = None,
    ):
        self.lengths = np.asarray(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.num_batches = num_batches
        self.rank = rank
        self.world_size = world_size
        self.row_length = row_length

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        own = itertools.islice(self._stream(), self.rank, None, self.world_size)
        return itertools.islice(own, self.num_batches)

    def _stream(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            yield from self.epoch(epoch)

    def epoch(self, number: int) -> list[Batch]:
        """Of all processes."""
        random = np.random.default_rng([self.seed, number])
        order = random.permutation(len(self.lengths))
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


def batches_per_epoch(
    lengths: Sequence[int], *, batch_size: int, seed: int, row_length: int | None = None
) -> int:
    """Of the first epoch; packed ones differ a little."""
    plan = BatchPlan(
        lengths,
        batch_size=batch_size,
        seed=seed,
        num_batches=0,
        rank=0,
        world_size=1,
        row_length=row_length,
    )
    return len(plan.epoch(0))


@dataclass(frozen=True, kw_only=True)
class WeightedText:
    """Teacher-forced text, right padded. B rows of L tokens."""

    input_ids: torch.Tensor  # [B, L] int64
    attention_mask: torch.Tensor  # [B, L] 1 for real tokens
    # [B, L] float32, how much the draft of the token at j counts; 0 is not trained
    weights: torch.Tensor
    # [B, L] int64, several texts a row: see drafters/target/segments.py
    segments: torch.Tensor | None = None
    places: torch.Tensor | None = (
        # [B, L] int64, number of each token among all of a data folder; -1, or None: it is in none
        None
    )
