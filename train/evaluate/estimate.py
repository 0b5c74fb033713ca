"""Figures with their 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
