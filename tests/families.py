"""Families and what each of them can do, read from the code. `python -m tests.families` writes
docs/families.md."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from draftsmith.drafters.heads.mtp import LlamaMtp
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.tree_shape import DynamicTree, FixedTree, GrownShape
from draftsmith.train.config import FAMILIES as TRAINED
from draftsmith.train.config import LAYOUTS
from draftsmith.train.export.table import WRITERS

# The class of a family's drafters, where the family only chooses among some that do the same.
DRAFTERS = FAMILIES | {"mtp": LlamaMtp}
PAGE = Path(__file__).parents[1] / "docs" / "families.md"
ABOVE = """# Families

What each family of trained drafts can do. All are trained, served, evaluated and learned online, and served losslessly, greedily and sampled.

"""
BELOW = """
`grown` trees are `dynamic` and `sampled`, `choices` those of given ranks. `ends unsure chains` is `--least-confidence`. `export --to` refuses any other layout with the reason. Text drafts (`--suffix`) have no weights.

This page is written by `python -m tests.families`.
"""


def trees_of(family: str) -> str:
    drafter = DRAFTERS[family]
    if getattr(drafter, "propose_tree", None) is None:
        return "-"
    shapes = getattr(drafter, "shapes", get_args(GrownShape))
    named = {"grown": DynamicTree in shapes, "choices": FixedTree in shapes}
    return ", ".join(name for name, is_grown in named.items() if is_grown)


def ends_chains(family: str) -> str:
    drafter = DRAFTERS[family]
    return "yes" if getattr(drafter, "ends_chains", False) else "-"


def page() -> str:
    assert set(TRAINED) == set(FAMILIES)
    lines = [
        "| family | trees | ends unsure chains | exported to |",
        "|---|---|---|---|",
        *(
            f"| `{family}` | {trees_of(family)} | {ends_chains(family)} | "
            f"{', '.join(layout for layout in LAYOUTS if layout in WRITERS[family])} |"
            for family in TRAINED
        ),
    ]
    return ABOVE + "\n".join(lines) + "\n" + BELOW


if __name__ == "__main__":
    PAGE.write_text(page())
