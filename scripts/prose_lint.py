"""Lint of docstrings and comments: clauses in place of sentences, and words that the field does not
use.

    python scripts/prose_lint.py [FILE ...]   offences of these files, or of all; status 1 for any
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "drafters", "train", "serve", "distill", "fleet", "src/draftsmith", "scripts")
OPENING = re.compile(r"(What|Whether|Who|Whose|Of|By|How|When|Where)\b")
# Word -> what to write. Code in backquotes is not prose.
BANNED = {
    "law|laws": "distribution, logits or rule",
    "tell|tells|told|telling": "report, give, return, state",
    "hear|hears|heard": "receive, observe",
    "speak|speaks|spoke|spoken": "log, print, emit",
    "know|knows|knew": "hold, import, depend on",
    "want|wants|wanted": "need, require",
    "who|whom|whoever": "which, that; or the caller, the client",
    "nobody|somebody|anybody": "none, a caller, a client",
    "obey|obeys|obeyed": "follow, apply",
}
WORDS = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): mend for words, mend in BANNED.items()}
QUOTED = re.compile(r"``?[^`]*``?|\"[^\"\n]*\"|https?://\S+")
# This file names the words.
EXEMPT = ("scripts/prose_lint.py",)


class Offence(NamedTuple):
    line: int
    message: str


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, text
        # No expression holds a docstring.
        statements = (ast.stmt, ast.excepthandler, ast.match_case)
        nodes += [one for one in ast.iter_child_nodes(node) if isinstance(one, statements)]


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def offences(source: str) -> list[Offence]:
    """All offences of a Python source, in the order of its lines."""
    found, documented = [], list(docstrings(source))
    for line, text in documented:
        if opening := OPENING.match(text):
            found.append(
                Offence(line, f"a docstring opens with {opening[0]!r}; begin with a noun or a verb")
            )
    for line, text in (*documented, *comments(source)):
        prose = QUOTED.sub("", text)
        for pattern, mend in WORDS.items():
            found += [Offence(line, f"{word!r}; write: {mend}") for word in pattern.findall(prose)]
    return sorted(found)


def files() -> list[str]:
    """All linted files, relative to the root; links to code folders are not followed."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    names = (path.relative_to(ROOT).as_posix() for path in paths)
    linked = tuple(f"src/draftsmith/{folder}/" for folder in FOLDERS)
    return [name for name in names if name not in EXEMPT and not name.startswith(linked)]


def main(arguments: list[str]) -> int:
    linted = files()
    found = [
        f"{name}:{line}: {message}"
        for name in linted
        if not arguments or name in arguments
        for line, message in offences((ROOT / name).read_text(encoding="utf-8"))
    ]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
