"""Figures with their 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.kernels.acceptance import bootstrap_ratio


class Estimate(NamedTuple):
    value: float
    low: float
    high: float


def ratio(top: Sequence[float], bottom: Sequence[float], seed: int = 0) -> Estimate:
    """sum(top) / sum(bottom) with a 95 % interval over their pairs."""
    interval = bootstrap_ratio(top, bottom, seed=seed)
    return Estimate(sum(top) / sum(bottom), interval.low, interval.high)


def reached_ratio(top: Sequence[float], bottom: Sequence[float], seed: int = 0) -> Estimate | None:
    """`ratio` over the pairs whose bottom is more than 0; None without any."""
    pairs = [(over, under) for over, under in zip(top, bottom, strict=True) if under > 0]
    if not pairs:
        return None
    return ratio([over for over, _ in pairs], [under for _, under in pairs], seed)


BINS = 10  # of equal width


class Reliability(NamedTuple):
    """Calibration of a draft's own estimate of its alpha (`UnrolledStep.confidence`): sums over the
    estimates that fell into each bin.

    The estimate is compared with alpha itself, sum_v min(p_v, q_v), not with the acceptance of one
    drawn token: the same mean with less noise.
    """

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
