"""Logged p of records: the sampling of each drafted position and of its draft, its distance from
this target's p, and bounds of alpha from it alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.drafters.interface import TrainedDrafter, UnrollBatch, UnrolledStep, head_of
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.top_tokens import TopProbs, top_overlap
from draftsmith.record import ProbArrays, RoundRecord, sampler_of


class LoggedPosition(NamedTuple):
    """One drafted position of a record."""

    record: RoundRecord
    depth: int

    @property
    def is_known(self) -> bool:
        """True where the logged p bounds alpha."""
        return self.record.p[self.depth :].is_logged


def sampling_rows(
    logged: Sequence[LoggedPosition], device: torch.device | str, *, of_drafts: bool = False
) -> SamplingRows:
    """Sampling of the requests, or the one that the engine of each position draws its drafts with:
    alpha of a draft is that of its logits under it."""
    rows = [_sampling(one.record, sampler_of(one.record) if of_drafts else "") for one in logged]
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return SamplingRows.of(temperature, top_k=top_k, top_p=top_p, min_p=min_p, device=device)


def _sampling(record: RoundRecord, sampler: str) -> tuple[float, int, float, float]:
    temperature = 0.0 if sampler == "greedy" else record.temperature
    if sampler == "unfiltered":
        return temperature, 0, 1.0, 0.0
    return temperature, record.top_k, record.top_p, record.min_p


def logged_arrays(logged: Sequence[LoggedPosition]) -> ProbArrays:
    """Logged p of the positions, as wide as the widest."""
    parts = []
    # Neighbours of one record are taken at once.
    for _, some in itertools.groupby(logged, key=lambda one: id(one.record)):
        group = list(some)
        arrays = group[0].record.p.arrays
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


class SampledTop(NamedTuple):
    """Logged p under their requests' sampling, of the positions where any is logged."""

    places: torch.Tensor  # [m] int64, of those positions among all n
    top: TopProbs  # [m]; the tail is 0 where the support lies inside the logged tokens
    num_positions: int  # n


def sampled_top(
    logged: Sequence[LoggedPosition], known: ProbArrays, device: torch.device | str = "cpu"
) -> SampledTop:
    """`known`: the positions' `logged_arrays`."""
    # A buffer of tokens alone holds no distributions.
    places = np.flatnonzero(np.isfinite(known.logprobs).any(axis=1))
    records = [logged[place].record for place in places]
    chosen = known.chosen(places)
    probs = _tempered(chosen, [one.temperature for one in records]).to(device)
    tail = (1 - probs.sum(-1)).clamp(min=0)
    settings = torch.tensor(
        [_settings(one, probs.shape[1]) for one in records], dtype=probs.dtype, device=device
    )
    probs, tail = filtered(probs, tail, *settings.reshape(-1, 3).T)
    ids = torch.from_numpy(chosen.ids).long().to(device)
    top = TopProbs(ids, probs.float().log(), tail.float())
    return SampledTop(torch.from_numpy(places).to(device), top, len(logged))


def logged_alpha(sampled: SampledTop, q: torch.Tensor) -> torch.Tensor:
    """Bounds of alpha [n, 2] on the CPU, NaN where nothing is logged; `q` [n, V] are a draft's
    probabilities under the requests' sampling.

    A filter that cuts behind the logged tokens raises the probabilities of the rest by an unknown
    amount: bounds are off by that.
    """
    bounds = torch.full((sampled.num_positions, 2), math.nan)
    if len(sampled.places):
        of_logged = q if len(sampled.places) == sampled.num_positions else q[sampled.places]
        overlap = top_overlap(sampled.top, of_logged)
        bounds[sampled.places.cpu()] = torch.stack(overlap, dim=-1).float().cpu()
    return bounds


def filtered(
    probs: torch.Tensor,
    tail: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [n, w], likeliest first, and their tails [n] under filters [n], each neutral
    where it is w or more, infinite and 0. The tail is 0 where a filter cuts among the w."""
    # transformers' order; each filter sees the distribution that the one before left.
    place = torch.arange(probs.shape[1], device=probs.device)
    probs, tail = _keep(probs, tail, place < top_k[:, None])
    before = probs.cumsum(-1) - probs
    probs, tail = _keep(probs, tail, before < top_p[:, None])
    return _keep(probs, tail, probs >= min_p[:, None] * probs[:, :1])


def _tempered(known: ProbArrays, temperatures: Sequence[float]) -> torch.Tensor:
    """Probabilities [n, w], float64, at the requests' temperatures, likeliest first."""
    temperature = torch.tensor(temperatures, dtype=torch.float64)
    greedy = temperature == 0
    divisor = torch.where(greedy, 1.0, temperature)[:, None]
    logprobs, norms = (
        torch.from_numpy(values).double() for values in (known.logprobs, known.log_norms)
    )
    probs = (logprobs / divisor - norms[:, None]).exp()
    first = torch.arange(probs.shape[1]) == 0
    return torch.where(greedy[:, None], first.double(), probs)


def _settings(record: RoundRecord, width: int) -> tuple[float, float, float]:
    """Filter settings (top_k, top_p, min_p), neutral where they are off, and for a greedy
    distribution, which no filter changes."""
    if record.temperature == 0:
        return width, math.inf, 0.0
    # More than are logged, or off: the cut, if any, lies in the tail.
    top_k = record.top_k if 0 < record.top_k <= width else width
    return top_k, record.top_p if record.top_p < 1 else math.inf, record.min_p


def _keep(
    probs: torch.Tensor, tail: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Removes tokens that are not kept. They are less likely than the kept ones, so the tail goes
    with them."""
    is_cut = (~kept & (probs > 0)).any(-1)
    probs = probs.where(kept, 0.0)
    normalised = probs / probs.sum(-1, keepdim=True)
    return torch.where(is_cut[:, None], normalised, probs), tail.where(~is_cut, 0.0)


class Position(NamedTuple):
    row: int  # of the batch
    logged: LoggedPosition

    @property
    def absolute(self) -> int:
        return self.logged.record.position + self.logged.depth


def positions_of(text: ServedText, row: int, *, max_depth: int, max_length: int) -> list[Position]:
    """Accepted positions and the first rejected one of each round, whose context became text."""
    found = []
    for record in text.records:
        # The end of an answer may trim accepted tokens off.
        behind = min(record.accepted, len(record.committed)) + 1
        known = min(len(record.p), behind, max_depth, max_length - record.position)
        found += [Position(row, LoggedPosition(record, depth)) for depth in range(known)]
    return found


@dataclass(frozen=True)
class DraftedPositions:
    """A draft's states at n positions."""

    drafter: TrainedDrafter
    steps: Sequence[UnrolledStep]
    hidden: torch.Tensor  # [n, H], 0 where nothing was drafted
    number: torch.Tensor  # [n] of the step. A language model has one step for all depths.
    is_drafted: torch.Tensor  # [n] bool

    @classmethod
    def of(
        cls, drafter: TrainedDrafter, batch: UnrollBatch, positions: Sequence[Position]
    ) -> DraftedPositions:
        steps = list(drafter.unroll(batch))
        device = batch.input_ids.device
        row, depth, absolute = torch.tensor(
            [(one.row, one.logged.depth, one.absolute) for one in positions], device=device
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
            return (hidden @ heads[0].T).float()
        logits = hidden.new_empty(len(hidden), heads[0].shape[0])
        for index, head in enumerate(heads):
            mine = number == index
            logits[mine] = hidden[mine] @ head.T
        return logits.float()
