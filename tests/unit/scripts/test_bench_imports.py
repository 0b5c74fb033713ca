"""Check of names: what the benchmarks import from the package is there; nothing else runs most of them."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "scripts" / "bench"


def names_of(path: Path) -> list[tuple[str, str]]:
    """(module, name) of every import from the package."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftsmith.")
        for alias in node.names
    ]


@pytest.mark.parametrize("chapter", sorted({path.parent.name for path in BENCH.glob("*/*.py")}))
def test_what_benchmarks_import_is_there(chapter: str) -> None:
    files = sorted((BENCH / chapter).glob("*.py"))
    for module, name in {pair for path in files for pair in names_of(path)}:
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), (module, name)
