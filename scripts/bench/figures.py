"""Means over seeds, as the reports print them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def over_seeds(values: Sequence[float], digits: int = 3) -> str:
    """`1.624 +- 0.093`: the mean and half of its 95 % t interval, which a single seed has not; `-`
    where a value is nan."""
    mean = sum(values) / len(values)
    if math.isnan(mean):
        return "-"
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    quantile = QUANTILES[min(len(values) - 1, len(QUANTILES)) - 1]
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.{digits}f} +- {half:.{digits}f}"
