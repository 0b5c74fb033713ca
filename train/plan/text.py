"""Numbers and rows of a plan as text."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.train.doctor.memory import GIB
from draftsmith.train.plan.forecast import Spread


def interval(spread: Spread) -> str:
    return f"{spread.value:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells, one a line."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
