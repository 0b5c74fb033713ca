"""Weights that make the weighted sum of a divergence a mean. B rows of L positions; a row is a text unless `segments` [B, L]
numbers the texts of each row from 0 on (-1 at padding).
"""

from __future__ import annotations

import torch


def token_mean(weights: torch.Tensor) -> torch.Tensor:
    """[B, L] -> weights that sum to 1 in all: every token counts alike, long texts more."""
    return weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


def sample_mean(weights: torch.Tensor) -> torch.Tensor:
    """[B, L] -> weights that sum to 1/n in each of the n texts with any weight: every text counts alike."""
    shares = per_sample(weights)
    return shares / (shares.sum(dim=-1) > 0).sum().clamp(min=1)


def per_sample(weights: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
    """[B, L] -> weights that sum to 1 in each text that has any: `sample_mean` where the texts are counted elsewhere."""
    sums = text_sums(weights, segments)
    totals = sums if segments is None else sums.gather(-1, segments.clamp(min=0))
    return weights / totals.clamp(min=torch.finfo(weights.dtype).tiny)


def text_sums(weights: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
    """[B, n], n >= the texts of any row: the sum over each text, 0 where a row has no such text."""
    if segments is None:
        return weights.sum(dim=-1, keepdim=True)
    return torch.zeros_like(weights).scatter_add(-1, segments.clamp(min=0), weights)
