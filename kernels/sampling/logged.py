"""Distributions as records hold them: the likeliest tokens, the drafted token's own logprob and the
norm under the request's temperature. n positions, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftsmith.kernels.sampling.top_tokens import top_probs
from draftsmith.record import TOP, ProbArrays


def prob_arrays(logits: torch.Tensor, log_norms: np.ndarray, tokens: Sequence[int]) -> ProbArrays:
    """Arrays of logits [n, V] with the logprobs of the drafted `tokens`."""
    distribution = top_probs(logits, TOP)
    chosen = torch.tensor(tokens, device=logits.device).clamp(min=0)[:, None]
    # Apart from the likeliest token by as much as their logits, without a second logsumexp.
    gap = logits.gather(-1, chosen).float() - logits.gather(-1, distribution.ids[:, :1]).float()
    drafted = distribution.logprobs[:, 0] + gap[:, 0]
    return ProbArrays(
        distribution.ids.int().cpu().numpy(),
        distribution.logprobs.float().cpu().numpy(),
        distribution.tail.float().cpu().numpy(),
        log_norms,
        drafted.cpu().numpy(),
    )


def log_norms_of(logits: torch.Tensor, temperatures: Sequence[float]) -> np.ndarray:
    """[n] log sum_v exp(logprob_v / temperature), 0 where the temperature is 0 or 1."""
    if all(temperature in (0.0, 1.0) for temperature in temperatures):
        return np.zeros(len(temperatures), dtype=np.float32)
    scale = torch.tensor(
        [t or 1.0 for t in temperatures], dtype=torch.float32, device=logits.device
    )[:, None]
    return torch.logsumexp(torch.log_softmax(logits.float(), dim=-1) / scale, dim=-1).cpu().numpy()
