"""Sparse distributions: the likeliest tokens of a categorical distribution and the mass outside
them. N rows, V vocabulary, k kept tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from draftsmith.config import TOP
from draftsmith.kernels.dispatch import reads_freely

# Tokens that are looked at as one while the likeliest are searched.
GROUP = 8


class TopProbs(NamedTuple):
    """Never renormalised: exp(logprobs).sum(-1) + tail == 1."""

    ids: torch.Tensor  # [N, k] int64, likeliest first
    logprobs: torch.Tensor  # [N, k] float32 (float64 for float64 logits)
    tail: torch.Tensor  # [N] probability outside `ids`


class Overlap(NamedTuple):
    """Bounds of alpha = sum_v min(p_v, q_v)."""

    low: torch.Tensor  # [N]
    high: torch.Tensor  # [N]


def top_probs(logits: torch.Tensor, k: int = TOP) -> TopProbs:
    """The `k` likeliest tokens of each row of logits [N, V]; all V of them when V < k."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    ids = _likeliest(logits, min(k, logits.shape[-1]))
    # On a CPU half the time of a logsumexp.
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids)
    tail = (1 - logprobs.exp().sum(dim=-1)).clamp(min=0)
    return TopProbs(ids, logprobs, tail)


def _likeliest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """[N, k] ids, the largest first."""
    if not reads_freely(logits.device) or k == logits.shape[-1]:
        return torch.topk(logits, k, dim=-1).indices
    chosen = _best(logits, k)
    order = np.argsort(-logits.gather(-1, chosen).detach().numpy(), axis=-1)
    return chosen.gather(-1, torch.from_numpy(order))


def _best(values: torch.Tensor, k: int) -> torch.Tensor:
    """[N, k] places of the largest values [N, V] in any order.

    The k largest are in the k groups with the largest maxima or in what is left over, and those
    groups are found in the same way: 2 to 5 times faster than choosing of all. A group's members
    are V / `GROUP` apart, so that maxima are taken of whole vectors.
    """
    apart = values.shape[-1] // GROUP
    if apart < 2 * k:
        # numpy uses vector instructions: three times faster than torch.topk.
        return torch.from_numpy(np.argpartition(values.detach().numpy(), -k, axis=-1)[:, -k:])
    whole = apart * GROUP
    groups = _best(values[:, :whole].unflatten(-1, (GROUP, apart)).amax(dim=1), k)
    places = (groups[:, :, None] + torch.arange(0, whole, apart)).flatten(1)
    if whole < values.shape[-1]:
        rest = torch.arange(whole, values.shape[-1]).expand(len(values), -1)
        places = torch.cat([places, rest], dim=1)
    return places.gather(-1, _best(values.gather(-1, places), k))


def top_overlap(distribution: TopProbs, q: torch.Tensor) -> Overlap:
    """Bounds of alpha between a sparse p and the probabilities q [N, V] of a draft: what the kept
    tokens prove, and what the tail could add."""
    kept = q.to(distribution.logprobs.dtype).gather(-1, distribution.ids)
    low = torch.minimum(distribution.logprobs.exp(), kept).sum(dim=-1)
    q_tail = (1 - kept.sum(dim=-1)).clamp(min=0)
    return Overlap(low, low + torch.minimum(distribution.tail, q_tail))
