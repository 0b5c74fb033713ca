"""Tables of scripts/bench_drafters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scripts.bench.drafters.cells import FORWARD_KL
from scripts.bench.drafters.figures import (
    Figure,
    Row,
    alpha,
    over_seeds,
    ratio,
    rows_of,
    tau,
    temperatures,
    trained,
)
from scripts.bench.markdown_table import header, line

Report = dict[str, Any]


def tables(report: Report) -> str:
    """Markdown; parts of which nothing was measured are left out."""
    parts = [families(report), objectives(report), peers(report)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def families(report: Report) -> list[str]:
    rows, depths = report["rows"], range(report["k"])
    seen = names(rows, "families") + [f"peers/{name}" for name in names(rows, "peers")]
    if not seen:
        return []
    at = temperatures(rows)
    head = ["draft", "seeds", "steps", "passes", *(f"tau, T = {t:g}" for t in at)]
    head += [f"alpha_{depth + 1}, T = {t:g}" for t in at for depth in depths]
    lines = [*header(*head)]
    for name in seen:
        found = (
            rows_of(rows, "peers", name.removeprefix("peers/"))
            if "/" in name
            else rows_of(rows, "families", name)
        )
        cells = [
            str(len(found)),
            over_seeds(found, trained("steps")).text(0),
            over_seeds(found, trained("passes")).text(1),
        ]
        cells += [over_seeds(found, tau(t)).text() for t in at]
        cells += [
            Figure(over_seeds(found, alpha(t, depth)).mean, math.nan).text()
            for t in at
            for depth in depths
        ]
        label = f"eagle3 by {name.removeprefix('peers/')}" if "/" in name else name
        lines.append(line(label, *cells))
    return lines


def objectives(report: Report) -> list[str]:
    rows = report["rows"]
    base, seen = rows_of(rows, "families", "eagle3"), names(rows, "objectives")
    if not seen or not base:
        return []
    at = temperatures(rows)
    taus = (*(f"tau, T = {t:g}" for t in at), *(f"/ forward KL, T = {t:g}" for t in at))
    own = (over_seeds(base, tau(t)).text() for t in at)
    lines = header("eagle3 trained by", "seeds", *taus)
    lines.append(line(FORWARD_KL, len(base), *own, *("1" for _ in at)))
    for name in seen:
        found = rows_of(rows, "objectives", name)
        cells = [over_seeds(found, tau(t)).text() for t in at]
        cells += [ratio(found, base, tau(t)).text() for t in at]
        lines.append(line(name, len(found), *cells))
    return lines


def peers(report: Report) -> list[str]:
    rows, at = report["rows"], temperatures(report["rows"])
    ours, seen = rows_of(rows, "families", "eagle3"), names(rows, "peers")
    if not seen or not ours:
        return []
    lines = header("our eagle3 beside", *(f"tau ratio, T = {t:g}" for t in at))
    return lines + [
        line(name, *(ratio(ours, rows_of(rows, "peers", name), tau(t)).text() for t in at))
        for name in seen
    ]


def names(rows: Sequence[Row], part: str) -> list[str]:
    return list(dict.fromkeys(row["cell"]["name"] for row in rows if row["cell"]["part"] == part))
