"""Goodness-of-fit tests with stated false-alarm rates, and what they would have seen
(their power)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# cells below it are pooled: the chi-square distribution of the statistic needs a few counts a cell
MIN_EXPECTED = 5.0


class Fit(NamedTuple):
    statistic: float
    degrees: int
    p_value: float
    num_samples: int


def g_test(counts: torch.Tensor, probs: torch.Tensor, *, min_expected: float = MIN_EXPECTED) -> Fit:
    """Likelihood-ratio test of counts [C] against a distribution probs [C]. A count where the
    distribution has no mass gives p-value 0."""
    pooled_counts, expected = _pool(counts, probs, min_expected)
    if pooled_counts is None:
        return Fit(math.inf, 1, 0.0, int(counts.sum()))
    seen = pooled_counts > 0
    statistic = (
        2 * (pooled_counts[seen] * (pooled_counts[seen] / expected[seen]).log()).sum().item()
    )
    return _fit(statistic, expected, counts)


def chi_square(
    counts: torch.Tensor, probs: torch.Tensor, *, min_expected: float = MIN_EXPECTED
) -> Fit:
    """Pearson's test of counts [C] against a distribution probs [C]. A count where the distribution
    has no mass gives p-value 0."""
    pooled_counts, expected = _pool(counts, probs, min_expected)
    if pooled_counts is None:
        return Fit(math.inf, 1, 0.0, int(counts.sum()))
    return _fit(((pooled_counts - expected) ** 2 / expected).sum().item(), expected, counts)


def homogeneity(
    first: torch.Tensor, second: torch.Tensor, *, min_expected: float = MIN_EXPECTED
) -> Fit:
    """Pearson's test that two samples, counts [C] each, come from one distribution, whatever it is.

    `num_samples` is n m / (n + m): as many, held against a known distribution, would show as small
    a bias.
    """
    counts = torch.stack([first, second]).double().cpu()
    sizes, totals = counts.sum(dim=1, keepdim=True), counts.sum(dim=0)
    counts = counts[:, torch.argsort(totals)]
    # expectations in the smaller sample
    smaller = counts.sum(dim=0) * float(sizes.min() / sizes.sum())
    num_pooled = _num_pooled(smaller, min_expected)
    if num_pooled > 1:
        counts = torch.cat(
            [counts[:, :num_pooled].sum(dim=1, keepdim=True), counts[:, num_pooled:]], dim=1
        )
    counts = counts[:, counts.sum(dim=0) > 0]
    expected = counts.sum(dim=0) * sizes / sizes.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = counts.shape[1] - 1
    return Fit(
        statistic, degrees, chi_square_survival(statistic, degrees), int(sizes.prod() / sizes.sum())
    )


def chi_square_survival(statistic: float, degrees: float) -> float:
    """P(X > statistic) of a chi-square distribution; 1 for zero degrees of freedom."""
    if degrees <= 0:
        return 1.0
    halves = torch.tensor([degrees / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return torch.special.gammaincc(halves[0], halves[1]).item()


def chi_square_threshold(degrees: int, false_alarm: float) -> float:
    """The statistic that a true distribution exceeds with chance `false_alarm`, by bisection."""
    low, high = 0.0, degrees + 10.0
    while chi_square_survival(high, degrees) > false_alarm:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if chi_square_survival(middle, degrees) > false_alarm else (low, middle)
        )
    return high


def detectable_bias(
    num_samples: int, degrees: int, false_alarm: float, *, miss: float = 0.01
) -> float:
    """The smallest bias the test sees with chance 1 - miss, as a total variation on two equal
    halves of the cells.

    Moving mass d from one half to the other gives a noncentral chi-square statistic with parameter
    4 n d^2, here by its normal approximation. 1, which is no bias that could be hidden, where
    nothing can be seen: no samples or one cell.
    """
    if num_samples < 1 or degrees < 1:
        return 1.0
    threshold = chi_square_threshold(degrees, false_alarm)
    z = math.sqrt(2) * torch.special.erfinv(torch.tensor(1 - 2 * miss, dtype=torch.float64)).item()
    noncentral = max(threshold - degrees, 1.0)
    for _ in range(100):
        noncentral = threshold - degrees + z * math.sqrt(2 * (degrees + 2 * noncentral))
    return min(1.0, math.sqrt(noncentral / (4 * num_samples)))


def _pool(
    counts: torch.Tensor, probs: torch.Tensor, min_expected: float
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Counts and expectations with the rarest cells joined into one; None when a count lies where
    the distribution has no mass."""
    counts, probs = counts.flatten().double().cpu(), probs.flatten().double().cpu()
    total = counts.sum()
    probs = probs / probs.sum()
    if bool(((counts > 0) & (probs == 0)).any()):
        return None, probs
    order = torch.argsort(probs)
    counts, expected = counts[order], (probs * total)[order]
    num_pooled = _num_pooled(expected, min_expected)
    if num_pooled > 1:
        counts = torch.cat([counts[:num_pooled].sum()[None], counts[num_pooled:]])
        expected = torch.cat([expected[:num_pooled].sum()[None], expected[num_pooled:]])
    possible = expected > 0
    return counts[possible], expected[possible]


def _num_pooled(expected: torch.Tensor, min_expected: float) -> int:
    """Number of the rarest cells, expectations ascending, to be joined until the pool and every
    other cell are large enough."""
    reach = torch.cumsum(expected, 0)
    num_pooled = int((expected < min_expected).sum())
    while num_pooled and num_pooled < len(expected) and reach[num_pooled - 1] < min_expected:
        num_pooled += 1
    return num_pooled


def _fit(statistic: float, expected: torch.Tensor, counts: torch.Tensor) -> Fit:
    degrees = len(expected) - 1
    return Fit(statistic, degrees, chi_square_survival(statistic, degrees), int(counts.sum()))
