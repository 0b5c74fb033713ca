"""A test that two samples have one distribution, and what it would have seen (its power); then
evidence against known distributions, exact at any number of samples and whatever they depend on
among themselves.

For evidence each draw has a distribution of its own, known before it is made. A bettor puts another
distribution p' beside p for the next draws, learned from earlier ones; the product of p'(x) / p(x)
has mean 1 whenever p is right, however many draws there are and whenever one stops (a martingale),
so it exceeds 1 / a with chance a at most (Ville). No normal approximation is made.

Legend of evidence: n draws, m outcomes of a draw, A strengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from scipy.special import chdtrc, chdtri, chndtrinc

# cells below it are pooled: the chi-square distribution of the statistic needs a few counts a cell
MIN_EXPECTED = 5.0


class Fit(NamedTuple):
    statistic: float
    degrees: int
    p_value: float
    num_samples: int


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
    pooled = num_pooled(smaller, min_expected)
    if pooled > 1:
        counts = torch.cat([counts[:, :pooled].sum(dim=1, keepdim=True), counts[:, pooled:]], dim=1)
    counts = counts[:, counts.sum(dim=0) > 0]
    expected = counts.sum(dim=0) * sizes / sizes.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = counts.shape[1] - 1
    return Fit(
        statistic, degrees, chi_square_survival(statistic, degrees), int(sizes.prod() / sizes.sum())
    )


def chi_square_survival(statistic: float, degrees: float) -> float:
    """P(X > statistic) of a chi-square distribution; 1 for zero degrees of freedom."""
    return float(chdtrc(degrees, max(statistic, 0.0))) if degrees > 0 else 1.0


def detectable_bias(
    num_samples: int, degrees: int, false_alarm: float, *, miss: float = 0.01
) -> float:
    """The smallest bias the test sees with chance 1 - miss, as a total variation on two equal
    halves of the cells.

    Moving mass d from one half to the other gives a noncentral chi-square statistic with parameter
    4 n d^2. 1, which is no bias that could be hidden, where nothing can be seen: no samples or one
    cell.
    """
    if num_samples < 1 or degrees < 1:
        return 1.0
    noncentral = float(chndtrinc(chdtri(degrees, false_alarm), degrees, miss))
    return min(1.0, math.sqrt(noncentral / (4 * num_samples)))


def num_pooled(expected: torch.Tensor, min_expected: float) -> int:
    """Number of the rarest cells, expectations ascending, to be joined until the pool and every
    other cell are large enough."""
    reach = torch.cumsum(expected, 0)
    count = int((expected < min_expected).sum())
    while count and count < len(expected) and reach[count - 1] < min_expected:
        count += 1
    return count


# counts that p' sets against what it has seen: the larger, the slower it learns
STRENGTHS = (2.0, 8.0, 32.0, 128.0, 512.0)
FIRST_BLOCK, GROWTH = 16, 1.1


def log_evidence(
    probs: torch.Tensor,
    drawn: torch.Tensor,
    groupings: Sequence[torch.Tensor],
    strengths: Sequence[float] = STRENGTHS,
) -> float:
    """The natural logarithm of the evidence: the mean over groupings and strengths, which is as
    exact as each.

    Args:
        probs: [n, m] float64, rows that add up to 1, padded by zeros.
        drawn: [n] int64, the outcome of each draw; one without probability makes the evidence
        infinite.
        groupings: each [n, m] int64, cells of the outcomes: a bias is taken to be alike for
        outcomes of one cell.
    """
    if not len(drawn):
        return 0.0
    if bool((probs.gather(1, drawn[:, None]) <= 0).any()):
        return math.inf
    logs = torch.cat([log_ratios(probs, drawn, cells, strengths) for cells in groupings])
    return float(logs.logsumexp(0)) - math.log(len(logs))


def log_ratios(
    probs: torch.Tensor, drawn: torch.Tensor, cells: torch.Tensor, strengths: Sequence[float]
) -> torch.Tensor:
    """[A]: the sum over draws of log p'(x) / p(x), where p' weighs each outcome by how often its
    cell was seen before beside how often it was to be expected."""
    strength = torch.tensor(strengths, dtype=torch.float64)
    seen = torch.zeros(int(cells.max()) + 1, dtype=torch.float64)
    expected, total = torch.zeros_like(seen), torch.zeros_like(strength)
    for part in blocks(len(drawn)):
        own, p, x = cells[part], probs[part], drawn[part][:, None]
        # [b, m, A]
        weights = (seen[own][..., None] + strength) / (expected[own][..., None] + strength)
        mass = (p[..., None] * weights).sum(dim=1)
        chosen = weights.gather(1, x[..., None].expand(-1, 1, len(strength)))[:, 0]
        total += (chosen.log() - mass.log()).sum(dim=0)
        seen.index_add_(0, own.gather(1, x)[:, 0], torch.ones(len(x), dtype=torch.float64))
        expected.index_add_(0, own.flatten(), p.flatten())
    return total


def blocks(count: int) -> Iterator[slice]:
    """Consecutive parts of `count` draws, growing: p' learns between them."""
    begin, size = 0, float(FIRST_BLOCK)
    while begin < count:
        yield slice(begin, begin + int(size))
        begin, size = begin + int(size), size * GROWTH
