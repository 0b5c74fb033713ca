"""Text that every Python installation has: the standard library's source (`stdlib:code`) and its
manual pages (`stdlib:prose`)."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from draftsmith.prompts.shares import uniform

SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "__pycache__",
    "pydoc_data",
}


class Document(NamedTuple):
    name: str
    text: str


def stdlib_code() -> list[Document]:
    """Every module of the standard library but its tests, in path order; about 11 MB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in _source_files(root):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 200:
            documents.append(Document(str(path.relative_to(root)), text))
    return documents


def _source_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder) / name


def stdlib_prose() -> list[Document]:
    """The language reference as shipped for `help()`, one document per topic; about 0.5 MB."""
    from pydoc_data.topics import topics

    return [Document(name, text) for name, text in sorted(topics.items()) if len(text) > 200]


CORPORA = {"stdlib:code": stdlib_code, "stdlib:prose": stdlib_prose}


def held_out(document: Document, share: float = 0.1) -> bool:
    """True when the document belongs to the evaluation part: decided by its name alone, so it never
    moves."""
    return uniform(document.name) < share
