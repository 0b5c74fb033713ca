"""Tables of scripts/bench_drafters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from draftsmith.files import markdown_table
from scripts.bench.figures import over_seeds

Row = dict[str, Any]
# Part -> what the ratios of its rows are.
RATIOS = {"objectives": "eagle3: tau over forward KL's", "peers": "our eagle3: tau over that of"}


def tables(report: dict[str, Any]) -> str:
    """Markdown; parts of which nothing was measured are left out."""
    rows, at = report["rows"], temperatures(report["rows"])
    parts = [families(rows, at, report["k"]), *(ratios(rows, at, part) for part in RATIOS)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def families(rows: Sequence[Row], at: Sequence[float], k: int) -> list[str]:
    peers = {f"eagle3 by {name}": found for name, found in by_name(rows, "peers").items()}
    head = ["draft", "seeds", "steps", "passes", *(f"tau, T = {t:g}" for t in at)]
    head += [f"alpha_{depth + 1}, T = {t:g}" for t in at for depth in range(k)]
    lines = []
    for name, found in (by_name(rows, "families") | peers).items():
        trained = [row["trained"] for row in found.values()]
        cells = [name, str(len(found)), over_seeds([one["steps"] for one in trained], 0)]
        cells.append(over_seeds([one["passes"] for one in trained], 1))
        cells += [over_seeds([tau(row, t) for row in found.values()]) for t in at]
        cells += [
            over_seeds([alpha(row, t, depth) for row in found.values()])
            for t in at
            for depth in range(k)
        ]
        lines.append(cells)
    return markdown_table(head, lines) if lines else []


def ratios(rows: Sequence[Row], at: Sequence[float], part: str) -> list[str]:
    """Seed by seed: both sides of a ratio saw the same order of the data."""
    base, lines = by_name(rows, "families").get("eagle3", {}), []
    for name, found in by_name(rows, part).items():
        pairs = [(found[seed], base[seed]) for seed in found if seed in base]
        if part == "peers":
            pairs = [(ours, theirs) for theirs, ours in pairs]
        if pairs:
            lines.append(
                [name, *(over_seeds([tau(a, t) / tau(b, t) for a, b in pairs]) for t in at)]
            )
    return markdown_table([RATIOS[part], *(f"T = {t:g}" for t in at)], lines) if lines else []


def by_name(rows: Sequence[Row], part: str) -> dict[str, dict[int, Row]]:
    """Rows of a part by name and seed."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["cell"]["part"] == part:
            found.setdefault(row["cell"]["name"], {})[row["cell"]["seed"]] = row
    return found


def tau(row: Row, temperature: float) -> float:
    return evaluation(row, temperature)["tau"]["value"]


def alpha(row: Row, temperature: float, depth: int) -> float:
    """nan where no round came so deep."""
    found = evaluation(row, temperature)["alpha"][depth]
    return math.nan if found is None else found["value"]


def evaluation(row: Row, temperature: float) -> dict[str, Any]:
    return next(one for one in row["evaluations"] if one["temperature"] == temperature)


def temperatures(rows: Sequence[Row]) -> list[float]:
    return sorted({one["temperature"] for row in rows for one in row["evaluations"]})
