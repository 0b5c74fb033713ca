"""Gain of a round from its cost and its expected acceptance. Pure arithmetic, torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """A figure and the bounds it lies in."""

    value: float
    low: float
    high: float


class Forecast(NamedTuple):
    """Gain of one draft length. `speedup` is tokens per second with drafts over without."""

    k: int
    tau: Spread
    break_even: float  # the tau at which drafting neither wins nor loses
    speedup: Spread


def tau_of(alphas: Sequence[float], k: int) -> float:
    """Committed tokens of a round of k drafts whose i-th is kept, given those before it, with
    chance alphas[i]; the last alpha goes on."""
    tau, reach = 1.0, 1.0
    for depth in range(k):
        reach *= alphas[min(depth, len(alphas) - 1)]
        tau += reach
    return tau


def alpha_of(tau: float, k: int) -> float:
    """The one alpha that gives this tau at every depth."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tau_of([middle], k) < tau else (low, middle)
    return (low + high) / 2


def forecast(k: int, cost: Spread, tau: Spread) -> Forecast:
    """`cost` of a drafted round, in rounds without drafts. A round without drafts commits one
    token."""
    speedup = Spread(tau.value / cost.value, tau.low / cost.high, tau.high / cost.low)
    return Forecast(k, tau, cost.value, speedup)


def best(forecasts: Sequence[Forecast]) -> Forecast:
    """The draft length of the greatest expected speed-up."""
    return max(forecasts, key=lambda one: one.speedup.value)


def between(points: dict[int, float], at: int) -> float:
    """Linear between the measured points, which hold the least and the greatest that is
    asked for."""
    if at in points:
        return points[at]
    below, above = max(x for x in points if x < at), min(x for x in points if x > at)
    return points[below] + (points[above] - points[below]) * (at - below) / (above - below)
