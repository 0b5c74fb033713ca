"""Evidence against known distributions, exact at any number of samples and whatever they depend on
among themselves.

Each draw has a distribution of its own, known before it is made. A bettor puts another distribution
p' beside p for the next draws, learned from earlier ones; the product of p'(x) / p(x) has mean 1
whenever p is right, however many draws there are and whenever one stops (a martingale), so it
exceeds 1 / a with chance a at most (Ville). No normal approximation is made.

Legend: n draws, m outcomes of a draw, A strengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

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
