"""Saturating power curve of a figure over the amount of data, and the sentence about more of it.

    figure(r) = limit - gain * r ** -exponent       r: data over the data there is

n measured amounts, S draws of the curve, E exponents.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from draftsmith.train.plan.forecast import Spread

EXPONENTS = np.geomspace(0.05, 3.0, 800)  # below the first it is a logarithm in effect
DRAWS = 4000
SURE = 2.0  # standard errors that a rise or fall must have to be one
LEAST_POINTS = 4
PAYS = 0.01  # of the figure, that twice the data must add to be worth having


class Points(NamedTuple):
    """Figures at growing amounts of data; the last is all there is."""

    amounts: np.ndarray  # [n]
    values: np.ndarray  # [n]
    covariance: np.ndarray  # [n, n] of their errors


class Power(NamedTuple):
    limit: float
    gain: float
    exponent: float

    def at(self, ratio: float) -> float:
        return self.limit - self.gain * ratio**-self.exponent


class Curve(NamedTuple):
    """The likeliest one, and draws of the figure that it may have at the data there is and at
    multiples of it."""

    likeliest: Power
    now: np.ndarray  # [S]
    rise: np.ndarray  # [S] from the least amount to all
    exponents: np.ndarray  # [S]
    span: float  # the data there is over the least amount

    def expected(self, times: float) -> Spread:
        return spread(self.now + self._added(times))

    def added(self, times: float) -> Spread:
        """Addition of `times` the data to the figure."""
        return spread(self._added(times))

    def _added(self, times: float) -> np.ndarray:
        return self.rise * (1 - times**-self.exponents) / (self.span**self.exponents - 1)


class Unclear(NamedTuple):
    reason: str


class Rising(NamedTuple):
    """Figures that rise from each amount to the next, far from any curve here."""

    last: float  # rise from the last amount but one to all


def spread(draws: np.ndarray) -> Spread:
    """Median and 95 % interval."""
    low, middle, high = np.percentile(draws, [2.5, 50, 97.5]).tolist()
    return Spread(middle, low, high)


def fit(points: Points, seed: int = 0) -> Curve | Rising | Unclear:
    """The curve through the points; `Unclear` where they fall, or rise within their errors;
    `Rising` where they do rise but no curve comes near, as when drafts have only begun to learn.

    Curves are drawn by their likelihood, all exponents between the bounds alike in logarithm and
    the figures at the least and the greatest amount alike. Points that scatter about the best one
    by more than their errors have these raised to what is seen.
    """
    if len(points.values) < LEAST_POINTS:
        return Unclear(f"{len(points.values)} amounts of data are too few for a curve")
    if (fall := fall_of(points)) is not None:
        return Unclear(fall)
    powers = powers_of(points)
    scale = max(1.0, powers.misfit.min() / (len(points.values) - 3))
    covariance = points.covariance * scale
    first_to_last = np.zeros(len(points.values))
    first_to_last[0], first_to_last[-1] = -1, 1
    rise = float(first_to_last @ points.values)
    error = math.sqrt(first_to_last @ covariance @ first_to_last)
    if rise <= SURE * error:
        if rises_throughout(points):
            return Rising(float(points.values[-1] - points.values[-2]))
        return Unclear(
            f"all of the data gives {rise:+.3f} over the least, within the error of {error:.3f}"
        )
    likelihood = -0.5 * powers.misfit / scale + powers.log_volume
    chances = np.exp(likelihood - likelihood.max())
    return drawn(points, powers, chances / chances.sum(), scale, seed)


class Powers(NamedTuple):
    """Curves of all exponents, by their figures at the least and at the greatest amount."""

    ends: np.ndarray  # [E, 2] likeliest figures
    covariance: np.ndarray  # [E, 2, 2]
    misfit: np.ndarray  # [E] chi squared
    log_volume: np.ndarray  # [E]


def powers_of(points: Points) -> Powers:
    ratios = points.amounts / points.amounts[-1]
    raised = ratios ** -EXPONENTS[:, None]
    # 1 at the least amount, 0 at the greatest.
    part = (raised - 1) / (raised[:, :1] - 1)
    design = np.stack([part, 1 - part], axis=-1)  # [E, n, 2]
    precision = np.linalg.inv(points.covariance)
    transposed = design.transpose(0, 2, 1) @ precision
    covariance = np.linalg.inv(transposed @ design)
    ends = (covariance @ transposed @ points.values[:, None])[..., 0]
    left = points.values - (design @ ends[..., None])[..., 0]
    misfit = np.einsum("en,nm,em->e", left, precision, left)
    return Powers(ends, covariance, misfit, 0.5 * np.linalg.slogdet(covariance)[1])


def drawn(points: Points, powers: Powers, chances: np.ndarray, scale: float, seed: int) -> Curve:
    random = np.random.default_rng(seed)
    numbers = random.choice(len(chances), size=DRAWS, p=chances)
    roots = np.linalg.cholesky(powers.covariance * scale)[numbers]
    noise = np.einsum("sij,sj->si", roots, random.standard_normal((DRAWS, 2)))
    ends = powers.ends[numbers] + noise
    span = float(points.amounts[-1] / points.amounts[0])
    best = int(powers.misfit.argmin())
    first, last = powers.ends[best].tolist()
    gain = (last - first) / (span ** EXPONENTS[best] - 1)
    return Curve(
        likeliest=Power(last + gain, gain, float(EXPONENTS[best])),
        now=ends[:, 1],
        rise=np.maximum(ends[:, 1] - ends[:, 0], 0.0),
        exponents=EXPONENTS[numbers],
        span=span,
    )


def rises_throughout(points: Points) -> bool:
    """True where each figure is above the one before, beyond their errors as they were given, and
    no rise is below the one before it beyond them."""
    count = len(points.values)
    rises = all(
        points.values[at + 1] - points.values[at] > SURE * error_between(points, at, at + 1)
        for at in range(count - 1)
    )
    return rises and all(bends_no_lower(points, at) for at in range(count - 2))


def bends_no_lower(points: Points, at: int) -> bool:
    """True unless the rise behind the figure after `at` is below the rise to it, beyond errors."""
    second = np.zeros(len(points.values))
    second[at : at + 3] = 1, -2, 1
    error = math.sqrt(max(float(second @ points.covariance @ second), 0.0))
    return float(second @ points.values) >= -SURE * error


def error_between(points: Points, first: int, second: int) -> float:
    """Standard error of the difference of two figures."""
    covariance = points.covariance
    variance = covariance[first, first] + covariance[second, second] - 2 * covariance[first, second]
    return math.sqrt(max(variance, 0.0))


def fall_of(points: Points) -> str | None:
    """The first fall beyond the errors, in words; None without one."""
    for later in range(1, len(points.values)):
        for earlier in range(later):
            fall = points.values[earlier] - points.values[later]
            if fall > SURE * error_between(points, earlier, later):
                return (
                    f"the figures fall from {points.values[earlier]:.3f} to "
                    f"{points.values[later]:.3f} with more data"
                )
    return None


def verdict(curve: Curve | Rising | Unclear, now: float) -> str:
    """One sentence: does more data pay?"""
    if isinstance(curve, Unclear):
        return f"cannot say whether more data pays: {curve.reason}"
    if isinstance(curve, Rising):
        word = "more data pays" if curve.last >= PAYS * now else "more data may pay"
        return (
            f"{word}: tau {now:.3f} now, {curve.last:.3f} above that of the amount before; its "
            "rise is not that of a curve that saturates, so nothing is extrapolated"
        )
    twice, most = curve.added(2), curve.expected(8)
    if twice.low > 0 and twice.value >= PAYS * now:
        word = "more data pays"
    elif twice.high < PAYS * now:
        word = "more data hardly pays"
    else:
        word = "more data may pay"
    return (
        f"{word}: tau {now:.3f} now, {shown(curve.expected(2))} expected of twice the data and "
        f"{shown(most)} of 8 times"
    )


def shown(one: Spread) -> str:
    return f"{one.value:.3f} ({one.low:.3f}-{one.high:.3f})"
