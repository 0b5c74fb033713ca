"""Tables and picture of scripts/bench_online."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.files import drawn, markdown_table
from scripts.bench.figures import over_seeds

Row = dict[str, Any]
STREAMS = (
    "stream", "seeds", "alpha, static draft", "alpha, learning", "gain", "windows below static",
    "worst window", "published, rolled back", "CPU s per 1,000 tokens: serving", "learning",
)  # fmt: skip


def tables(rows: Sequence[Row]) -> str:
    """Markdown; what was not measured is left out."""
    return "\n\n".join("\n".join(lines) for lines in (streams(rows), beside_offline(rows)) if lines)


def streams(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name, found in by_stream(rows).items():
        counted = [window for one in found for window in one["windows"] if not window["is_shift"]]
        gains = [window["live"] - window["static"] for window in counted]
        below = sum(gain < 0 for gain in gains)
        static, live = ([mean_alpha(one, name) for one in found] for name in ("static", "live"))
        cells = [
            name,
            str(len(found)),
            *map(over_seeds, (static, live, [a - b for a, b in zip(live, static)])),
            f"{below} of {len(gains)}",
            f"{min(gains):+.3f}",
            ", ".join(str(sum(one[key] for one in found)) for key in ("published", "rolled_back")),
            over_seeds([1e3 * one["serve_s"] / one["tokens"] for one in found], 2),
            over_seeds([1e3 * one["learn_s"] / one["tokens"] for one in found], 2),
        ]
        lines.append(cells)
    return markdown_table(STREAMS, lines)


def beside_offline(rows: Sequence[Row]) -> list[str]:
    found = [row["result"]["compared"] for row in rows if row["result"]["compared"]]
    if not found:
        return []
    figures = {
        "alpha gained": [one["online"] - one["static"] for one in found],
        "share of an offline draft's alpha, same texts": [
            one["online"] / one["offline"] for one in found
        ],
    }
    lines = [[name, str(len(found)), over_seeds(values)] for name, values in figures.items()]
    return markdown_table(("after the shift to prose", "seeds", "measured"), lines)


def by_stream(rows: Sequence[Row]) -> dict[str, list[Row]]:
    names = dict.fromkeys(row["cell"]["stream"] for row in rows)
    return {
        name: [row["result"] for row in rows if row["cell"]["stream"] == name] for name in names
    }


def mean_alpha(result: Row, name: str) -> float:
    """Over all positions."""
    positions = sum(window["positions"] for window in result["windows"])
    return sum(window[name] * window["positions"] for window in result["windows"]) / positions


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Windows of the first seed of each stream."""
    shown = by_stream(rows)
    size = (4.2 * len(shown), 3.6)
    with drawn(path, len(shown), figsize=size, sharey=True, squeeze=False) as axes:
        for axis, (name, found) in zip(axes[0], shown.items(), strict=True):
            windows = found[0]["windows"]
            axis.plot([one["live"] for one in windows], label="learning")
            axis.plot([one["static"] for one in windows], color="black", label="static, same texts")
            axis.set_title(name)
            axis.set_xlabel("windows")
        axes[0][0].set_ylabel("alpha")
        axes[0][0].legend()
