"""Calibration of a draft's own estimate of its alpha (`UnrolledStep.confidence`).

The estimate is compared with alpha itself, sum_v min(p_v, q_v), not with the acceptance of one
drawn token: the same mean with less noise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BINS = 10  # of equal width


class Reliability(NamedTuple):
    """Sums over the estimates that fell into each bin."""

    count: torch.Tensor  # [BINS]
    guessed: torch.Tensor  # [BINS]
    alpha: torch.Tensor  # [BINS]

    @classmethod
    def of(cls, guesses: torch.Tensor, alpha: torch.Tensor) -> Reliability:
        """Chances [R]."""
        guesses, alpha = guesses.double().cpu(), alpha.double().cpu()
        bins = (guesses * BINS).long().clamp(0, BINS - 1)
        sums = [
            torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, one)
            for one in (torch.ones_like(guesses), guesses, alpha)
        ]
        return cls(*sums)

    def plus(self, other: Reliability) -> Reliability:
        return Reliability(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def error(self) -> float:
        """Expected calibration error: the mean distance of estimate and alpha over bins, weighted
        by the number of estimates in each."""
        return float((self.guessed - self.alpha).abs().sum() / self.count.sum())
