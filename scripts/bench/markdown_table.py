"""Lines of a Markdown table, as the reports print them."""

from __future__ import annotations


def header(*cells: str) -> list[str]:
    return [line(*cells), line(*("---" for _ in cells))]


def line(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
