"""The list of mutants: edits of the code, each of which makes the output or the learning wrong,
with the tests that must fail.

`tests/mutants/*.yaml` hold them, one file for each code folder. An entry is

    - id: K1                     # unique
      file: kernels/verify/chain.py    # relative to the repository root
      old: text                  # occurs exactly once in the file
      new: text                  # what replaces it
      why: one sentence          # what would go wrong
      tests: [node ids]          # one to three, of the ordinary lane, a few seconds each; at least
      one must fail
      hang: true                 # optional: the edit makes a test run for ever, which then counts
      as failing
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Mutant:
    id: str
    file: str
    old: str
    new: str
    why: str
    tests: list[str] = field(hash=False)
    hang: bool = False

    @property
    def folder(self) -> str:
        return self.file.split("/")[0]

    def mutated(self, source: str) -> str:
        return source.replace(self.old, self.new, 1)


def load(root: Path) -> list[Mutant]:
    """All mutants of `root`/tests/mutants; raises ValueError for an entry with missing or unknown
    keys, or an id given twice."""
    mutants = []
    for path in sorted((root / "tests" / "mutants").glob("*.yaml")):
        mutants += [
            _entry(path.name, entry)
            for entry in yaml.safe_load(path.read_text(encoding="utf-8")) or []
        ]
    twice = [name for name, count in Counter(mutant.id for mutant in mutants).items() if count > 1]
    if twice:
        raise ValueError(
            f"ids {twice} occur twice in tests/mutants; give each edit an id of its own"
        )
    return mutants


def _entry(name: str, entry: dict[str, Any]) -> Mutant:
    known = {item.name for item in fields(Mutant)}
    if not set(entry) <= known or not known - {"hang"} <= set(entry):
        raise ValueError(
            f"tests/mutants/{name}: entry {entry.get('id')!r} has keys {sorted(entry)}; they are "
            f"{sorted(known)}"
        )
    return Mutant(**entry)


def outdated(mutant: Mutant, root: Path) -> str:
    """Why the entry no longer fits the code, in one line; empty when it does."""
    path = root / mutant.file
    if not path.is_file():
        return f"{mutant.file} does not exist"
    found = path.read_text(encoding="utf-8").count(mutant.old)
    if found != 1:
        return f"`old` occurs {found} times in {mutant.file}, not once"
    if mutant.old == mutant.new:
        return "`new` is `old`"
    try:
        if path.suffix == ".py":
            ast.parse(mutant.mutated(path.read_text(encoding="utf-8")))
    except SyntaxError as error:
        return f"the edited {mutant.file} does not compile: {error}"
    missing = [test for test in mutant.tests if not _defined(test, root)]
    if missing or not mutant.tests:
        return f"tests {missing} do not exist" if missing else "it names no test"
    return ""


def _defined(test: str, root: Path) -> bool:
    """True where the file of a node id defines its function; the parameters in brackets are left to
    the run."""
    file, _, name = test.partition("::")
    path = root / file
    return (
        bool(name)
        and path.is_file()
        and f"def {name.split('[')[0]}(" in path.read_text(encoding="utf-8")
    )
