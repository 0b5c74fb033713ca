"""Weights that make the weighted sum of a divergence a mean. B texts of L positions."""

from __future__ import annotations

import torch


def token_mean(weights: torch.Tensor) -> torch.Tensor:
    """[B, L] -> weights that sum to 1 in all: every token counts alike, long texts more."""
    return weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


def sample_mean(weights: torch.Tensor) -> torch.Tensor:
    """[B, L] -> weights that sum to 1/n in each of the n texts with any weight: every text counts alike."""
    shares = per_sample(weights)
    return shares / (shares.sum(dim=-1) > 0).sum().clamp(min=1)


def per_sample(weights: torch.Tensor) -> torch.Tensor:
    """[B, L] -> weights that sum to 1 in each text that has any: `sample_mean` where the texts are counted elsewhere."""
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
