"""Logged p of records: the sampling of each drafted position and of its draft, its distance from
this target's p, and bounds of alpha from it alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.top_tokens import TopProbs, top_overlap
from draftsmith.record import Distributions, RoundRecord, sampler_of

# Samplers whose drafted tokens are the draft's likeliest ones.
LIKELIEST = ("greedy", "target-only")


class Logged(NamedTuple):
    """One drafted position of a record."""

    record: RoundRecord
    depth: int

    @property
    def siblings(self) -> int:
        """Number of the draft's likeliest tokens that verification by p alone had before it."""
        is_tree = self.record.sampler == "target-only" and len(self.record.q) > self.depth
        return max(1, len(self.record.q[self.depth].ids)) if is_tree else 1

    @property
    def is_known(self) -> bool:
        """True where the logged p bounds alpha."""
        return self.siblings == 1 and bool(self.record.p[self.depth].ids)


def sampling_rows(logged: Sequence[Logged], device: torch.device | str = "cpu") -> SamplingRows:
    records = [one.record for one in logged]
    return SamplingRows.of(
        [record.temperature for record in records],
        top_k=[record.top_k for record in records],
        top_p=[record.top_p for record in records],
        min_p=[record.min_p for record in records],
        device=device,
    )


def draft_rows(logged: Sequence[Logged], device: torch.device | str = "cpu") -> SamplingRows:
    """Sampling that the engine of each position draws its drafts with: alpha of a draft is that of
    its logits under it."""
    samplers = [sampler_of(one.record) for one in logged]
    kept = [name != "unfiltered" for name in samplers]
    records = [one.record for one in logged]
    return SamplingRows.of(
        [
            0.0 if name in LIKELIEST else record.temperature
            for name, record in zip(samplers, records, strict=True)
        ],
        top_k=[record.top_k * keeps for record, keeps in zip(records, kept, strict=True)],
        top_p=[record.top_p if keeps else 1.0 for record, keeps in zip(records, kept, strict=True)],
        min_p=[record.min_p * keeps for record, keeps in zip(records, kept, strict=True)],
        device=device,
    )


def disagreement(logged: Sequence[Logged], target_logits: torch.Tensor) -> torch.Tensor:
    """Total variation [n], on the logged tokens, between the logged p and the distribution of raw
    `target_logits` [n, V]; 0 for a record without logged distributions."""
    logged_p = [Distributions.of(one.record.p)[one.depth : one.depth + 1].arrays for one in logged]
    width = max(distribution.ids.shape[1] for distribution in logged_p)
    if width == 0:
        return torch.zeros(len(logged))
    wide = [distribution.widened(width) for distribution in logged_p]
    ids, logprobs = (
        torch.from_numpy(np.concatenate(values)).to(target_logits.device)
        for values in ([one.ids for one in wide], [one.logprobs for one in wide])
    )
    ids = ids.long()
    if int(ids.max()) >= target_logits.shape[-1]:
        return torch.ones(len(logged))
    ours = target_logits.float().log_softmax(-1).gather(-1, ids).exp()
    difference = torch.where(logprobs == -torch.inf, 0.0, (ours - logprobs.exp()).abs())
    return difference.sum(-1).cpu() / 2


def logged_alpha(logged: Sequence[Logged], q_logits: torch.Tensor) -> torch.Tensor:
    """Bounds of alpha [n, 2] on the CPU, NaN where nothing is logged; `q_logits` [n, V] are
    processed.

    A filter that cuts behind the logged tokens raises the probabilities of the rest by an unknown
    amount: bounds are off by that.
    """
    bounds = torch.full((len(logged), 2), math.nan)
    # A buffer of tokens alone holds no distributions.
    has_p = [index for index, one in enumerate(logged) if one.record.p[one.depth].ids]
    if has_p:
        overlap = top_overlap(
            sampled_distribution([logged[index] for index in has_p], q_logits.device),
            q_logits[has_p],
        )
        bounds[has_p] = torch.stack(overlap, dim=-1).float().cpu()
    return bounds


def sampled_distribution(logged: Sequence[Logged], device: torch.device | str = "cpu") -> TopProbs:
    """Logged distributions under their requests' sampling. The tail is 0 where the distribution's
    support lies inside the logged tokens."""
    distributions = [one.record.p[one.depth] for one in logged]
    width = max(len(distribution.ids) for distribution in distributions)
    ids = torch.tensor(
        [
            distribution.ids + [0] * (width - len(distribution.ids))
            for distribution in distributions
        ],
        device=device,
    )
    probs = torch.stack([_tempered(one, width) for one in logged]).to(device)
    tail = (1 - probs.sum(-1)).clamp(min=0)
    settings = torch.tensor(
        [_settings(one, width) for one in logged], dtype=probs.dtype, device=device
    )
    probs, tail = filtered(probs, tail, *settings.T)
    return TopProbs(ids, probs.float().log(), tail.float())


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


def _tempered(one: Logged, width: int) -> torch.Tensor:
    """Probabilities [width], float64, at the request's temperature, likeliest first."""
    distribution, temperature = one.record.p[one.depth], one.record.temperature
    logprobs = torch.full((width,), -math.inf, dtype=torch.float64)
    logprobs[: len(distribution.ids)] = torch.tensor(distribution.logprobs, dtype=torch.float64)
    if temperature == 0:
        return torch.nn.functional.one_hot(torch.tensor(0), width).double()
    return (logprobs / temperature - distribution.log_norm).exp()


def _settings(one: Logged, width: int) -> tuple[float, float, float]:
    """Filter settings (top_k, top_p, min_p), neutral where they are off, and for a greedy
    distribution, which no filter changes."""
    record = one.record
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
