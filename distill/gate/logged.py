"""Logged p of records: the sampling of each drafted position and of its draft, and its distance
from this target's p."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.drafters.interface import UnrollBatch, UnrolledStep, head_of
from draftsmith.kernels.products.float32_products import multiply
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.record import Distributions, ProbArrays, RoundRecord, sampler_of
from draftsmith.train.objective.unrolled_loss import Unrollable


class Position(NamedTuple):
    """One drafted position of a record, whose text is a row of a batch."""

    row: int
    record: RoundRecord
    depth: int

    @property
    def absolute(self) -> int:
        return self.record.position + self.depth


def sampling_rows(positions: Sequence[Position], device: torch.device) -> SamplingRows:
    """Sampling of the requests."""
    return _rows_of([_sampling(one.record) for one in positions], device)


def draft_rows(positions: Sequence[Position], device: torch.device) -> SamplingRows:
    """Sampling that the engine of each position draws its drafts with: alpha of a draft is that of
    its logits under it."""
    return _rows_of([_drawing(one.record) for one in positions], device)


Sampling = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def _sampling(record: RoundRecord) -> Sampling:
    return record.temperature, record.top_k, record.top_p, record.min_p


def _drawing(record: RoundRecord) -> Sampling:
    sampler = sampler_of(record)
    if sampler == "unfiltered":
        return record.temperature, 0, 1.0, 0.0
    temperature = 0.0 if sampler == "greedy" else record.temperature
    return temperature, *_sampling(record)[1:]


def _rows_of(settings: Sequence[Sampling], device: torch.device) -> SamplingRows:
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*settings, strict=True))
    return SamplingRows.of(temperature, top_k=top_k, top_p=top_p, min_p=min_p, device=device)


def logged_arrays(logged: Sequence[Position]) -> ProbArrays:
    """Logged p of the positions, as wide as the widest."""
    parts = []
    # Neighbours of one record are taken at once.
    for _, some in itertools.groupby(logged, key=lambda one: id(one.record)):
        group = list(some)
        arrays = Distributions.of(group[0].record.p).arrays
        parts.append(arrays.chosen([one.depth for one in group]))
    return ProbArrays.joined(parts)


def disagreement(known: ProbArrays, target_logits: torch.Tensor) -> torch.Tensor:
    """Total variation [n], on the logged tokens, between the logged p and the distribution of raw
    `target_logits` [n, V]; 0 for a record without logged distributions."""
    if known.ids.shape[1] == 0:
        return torch.zeros(len(known.ids))
    ids, logprobs = (
        torch.from_numpy(values).to(target_logits.device) for values in (known.ids, known.logprobs)
    )
    ids = ids.long()
    if int(ids.max()) >= target_logits.shape[-1]:
        return torch.ones(len(ids))
    ours = target_logits.float().log_softmax(-1).gather(-1, ids).exp()
    difference = torch.where(logprobs == -torch.inf, 0.0, (ours - logprobs.exp()).abs())
    return difference.sum(-1).cpu() / 2


def positions_of(text: ServedText, row: int, *, max_depth: int, max_length: int) -> list[Position]:
    """Accepted positions and the first rejected one of each round, whose context became text."""
    found = []
    for record in text.records:
        # The end of an answer may trim accepted tokens off.
        behind = min(record.accepted, len(record.committed)) + 1
        known = min(len(record.p), behind, max_depth, max_length - record.position)
        found += [Position(row, record, depth) for depth in range(known)]
    return found


@dataclass(frozen=True)
class DraftedPositions:
    """A draft's states at n positions."""

    drafter: Unrollable
    steps: Sequence[UnrolledStep]
    hidden: torch.Tensor  # [n, H], 0 where nothing was drafted
    number: torch.Tensor  # [n] of the step. A language model has one step for all depths.
    is_drafted: torch.Tensor  # [n] bool

    @classmethod
    def of(
        cls, drafter: Unrollable, batch: UnrollBatch, positions: Sequence[Position]
    ) -> DraftedPositions:
        steps = list(drafter.unroll(batch))
        device = batch.input_ids.device
        row, depth, absolute = torch.tensor(
            [(one.row, one.depth, one.absolute) for one in positions], device=device
        ).T
        number = depth.clamp(max=len(steps) - 1)
        hidden = steps[0].hidden.new_zeros(len(positions), steps[0].hidden.shape[-1])
        is_drafted = torch.zeros(len(positions), dtype=torch.bool, device=device)
        for index, step in enumerate(steps):
            column = absolute - step.offset
            # The last known position may lie one behind the text when a stop string cut it.
            is_inside = (number == index) & (column >= 0) & (column < step.valid.shape[1])
            mine = is_inside.nonzero()[:, 0]
            hidden[mine] = step.hidden[row[mine], column[mine]]
            is_drafted[mine] = step.valid[row[mine], column[mine]]
        return cls(drafter, steps, hidden, number, is_drafted)

    def logits(self, part: slice) -> torch.Tensor:
        """[n, Vd] float32 of the positions of `part`."""
        hidden, number = self.hidden[part], self.number[part]
        heads = [head_of(step, self.drafter) for step in self.steps]
        if all(head is heads[0] for head in heads):
            return multiply(hidden, heads[0].T).float()
        logits = hidden.new_empty(len(hidden), heads[0].shape[0])
        for index, head in enumerate(heads):
            mine = number == index
            logits[mine] = multiply(hidden[mine], head.T)
        return logits.float()
