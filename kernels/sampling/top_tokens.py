"""Sparse distributions: the likeliest tokens of a categorical distribution and the mass outside
them. N rows, V vocabulary, k kept tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from draftsmith.record import TOP

# Neighbouring tokens that are looked at as one while the likeliest are searched.
GROUP = 32


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
    if logits.device.type != "cpu" or k == logits.shape[-1]:
        return torch.topk(logits, k, dim=-1).indices
    if logits.shape[-1] < 4 * k * GROUP:
        return _sorted_best(logits, k)
    # The k largest are in the k groups with the largest maxima or in what is left over: 2 to 5
    # times faster than choosing of all.
    whole = logits.shape[-1] - logits.shape[-1] % GROUP
    groups = _best(logits[:, :whole].unflatten(-1, (-1, GROUP)).amax(dim=-1), k)
    rest = torch.arange(whole, logits.shape[-1]).expand(len(logits), -1)
    ids = torch.cat([(groups[:, :, None] * GROUP + torch.arange(GROUP)).flatten(1), rest], dim=1)
    return ids.gather(-1, _sorted_best(logits.gather(-1, ids), k))


def _sorted_best(values: torch.Tensor, k: int) -> torch.Tensor:
    chosen = _best(values, k)
    return chosen.gather(-1, values.gather(-1, chosen).argsort(dim=-1, descending=True))


def _best(values: torch.Tensor, k: int) -> torch.Tensor:
    """[N, k] places of the largest values in any order. numpy uses vector instructions: three times
    faster than torch.topk."""
    return torch.from_numpy(np.argpartition(values.detach().numpy(), -k, axis=-1)[:, -k:])


def top_overlap(distribution: TopProbs, q_logits: torch.Tensor) -> Overlap:
    """Bounds of alpha between a sparse p and draft logits [N, V]: what the kept tokens prove, and
    what the tail could add."""
    log_q = torch.log_softmax(q_logits.to(distribution.logprobs.dtype), dim=-1).gather(
        -1, distribution.ids
    )
    low = torch.minimum(distribution.logprobs, log_q).exp().sum(dim=-1)
    q_tail = (1 - log_q.exp().sum(dim=-1)).clamp(min=0)
    return Overlap(low, low + torch.minimum(distribution.tail, q_tail))
