"""Table of scripts/bench_recipes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scripts.bench.drafters.figures import (
    Row,
    alpha,
    evaluation,
    over_seeds,
    ratio,
    rows_of,
    tau,
    temperatures,
    trained,
)
from scripts.bench.drafters.report import names
from scripts.bench.markdown_table import header, line
from scripts.bench.recipes.pipelines import FORWARD_KL


def table(rows: Sequence[Row]) -> str:
    """A line a pipeline, text and draft; ratios pair the seeds."""
    at = temperatures(rows)
    head = ["pipeline, text", "draft", "seeds", "CPU s", "steps"]
    for name in ("tau", "alpha_1", "MBSU", "tau / forward KL"):
        head += [f"{name}, T = {t:g}" for t in at]
    lines = header(*head)
    for part in dict.fromkeys(row["cell"]["part"] for row in rows):
        base = rows_of(rows, part, FORWARD_KL)
        for name in names(rows, part):
            found = rows_of(rows, part, name)
            cells = [part, name, str(len(found)), over_seeds(found, trained("seconds")).text(0)]
            cells += [over_seeds(found, trained("steps")).text(0)]
            cells += [over_seeds(found, tau(t)).text() for t in at]
            cells += [over_seeds(found, alpha(t, 0)).text() for t in at]
            cells += [mbsu(found, t) for t in at]
            is_base = name == FORWARD_KL
            cells += ["1" if is_base else ratio(found, base, tau(t)).text() for t in at]
            lines.append(line(*cells))
    return "\n".join(lines)


def mbsu(found: dict[int, Row], temperature: float) -> str:
    def value(row: Row) -> float:
        bound = evaluation(row, temperature).get("mbsu")
        return math.nan if bound is None else bound

    return over_seeds(found, value).text(2)
