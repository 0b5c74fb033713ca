"""Figures of scripts/bench_drafters over seeds: means, ratios of cells that share a seed, with 95 %
t intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
Value = Callable[[Row], float]
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Figure(NamedTuple):
    """`half` is the interval's half width; nan for a single seed, which says nothing about others.
    `mean` may be nan, too."""

    mean: float
    half: float

    def text(self, digits: int = 3) -> str:
        if math.isnan(self.mean):
            return "-"
        spread = "" if math.isnan(self.half) else f" +- {self.half:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


def figure(values: Sequence[float]) -> Figure:
    if len(values) < 2 or any(math.isnan(value) for value in values):
        return Figure(sum(values) / len(values), math.nan)
    quantile = QUANTILES[min(len(values) - 1, len(QUANTILES)) - 1]
    return Figure(
        statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))
    )


def rows_of(rows: Sequence[Row], part: str, name: str) -> dict[int, Row]:
    """Rows keyed by seed."""
    return {
        row["cell"]["seed"]: row
        for row in rows
        if (row["cell"]["part"], row["cell"]["name"]) == (part, name)
    }


def over_seeds(rows: dict[int, Row], value: Value) -> Figure:
    return figure([value(row) for row in rows.values()])


def ratio(above: dict[int, Row], below: dict[int, Row], value: Value) -> Figure:
    """Seed by seed: both sides of a ratio saw the same order of the data."""
    return figure([value(above[seed]) / value(below[seed]) for seed in above if seed in below])


def tau(temperature: float) -> Value:
    return lambda row: evaluation(row, temperature)["tau"]["value"]


def alpha(temperature: float, depth: int) -> Value:
    """nan where no round came so deep."""

    def value(row: Row) -> float:
        found = evaluation(row, temperature)["alpha"][depth]
        return math.nan if found is None else found["value"]

    return value


def trained(name: str) -> Value:
    return lambda row: row["trained"][name]


def evaluation(row: Row, temperature: float) -> dict[str, Any]:
    return next(one for one in row["evaluations"] if one["temperature"] == temperature)


def temperatures(rows: Sequence[Row]) -> list[float]:
    return sorted({one["temperature"] for row in rows for one in row["evaluations"]})
