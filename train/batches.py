"""Batches of sequences: padding, and the order of a whole run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.utils.data

from draftsmith.train.data import TokenSequence


class TokenBatch(NamedTuple):
    """Right padded to the longest row."""

    input_ids: torch.Tensor  # [B, L] int64
    attention_mask: torch.Tensor  # [B, L] int64, 1 for real tokens
    loss_mask: torch.Tensor  # [B, L] bool


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
