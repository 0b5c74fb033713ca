"""Goodness of fit of counts to a distribution, with the rarest cells joined into one."""

from __future__ import annotations

import math

import scipy.stats
import torch

from draftsmith.kernels.statistics import MIN_EXPECTED, Fit, num_pooled


def g_test(counts: torch.Tensor, probs: torch.Tensor, *, min_expected: float = MIN_EXPECTED) -> Fit:
    """Likelihood-ratio test of counts [C] against a distribution probs [C]. A count where the
    distribution has no mass gives p-value 0."""
    counts, probs = counts.flatten().double().cpu(), probs.flatten().double().cpu()
    total = int(counts.sum())
    if bool(((counts > 0) & (probs == 0)).any()):
        return Fit(math.inf, 1, 0.0, total)
    order = torch.argsort(probs)
    cells = torch.stack([counts[order], probs[order] / probs.sum() * total])
    pooled = num_pooled(cells[1], min_expected)
    if pooled > 1:
        cells = torch.cat([cells[:, :pooled].sum(dim=1, keepdim=True), cells[:, pooled:]], dim=1)
    seen, expected = cells[:, cells[1] > 0].numpy()
    found = scipy.stats.power_divergence(
        seen, expected * (seen.sum() / expected.sum()), lambda_="log-likelihood"
    )
    p_value = float(found.pvalue) if len(seen) > 1 else 1.0
    return Fit(float(found.statistic), len(seen) - 1, p_value, total)
