"""Text that every Python installation has: the standard library's source (`stdlib:code`), its
manual pages (`stdlib:prose`), and questions about the descriptions in it (`stdlib:tasks`)."""

from __future__ import annotations

import ast
import os
import random
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from draftsmith.prompts.shares import uniform

SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo",
    "__pycache__", "pydoc_data",
}  # fmt: skip


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

TASKS = "stdlib:tasks"
DESCRIBED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# {text}: one passage, {texts}: it and two others, {name}: what it is about.
QUESTIONS = (
    "Summarize: {text}",
    "{text}\n\nSummarize this in three sentences.",
    "{texts}\n\nWhat is {name}?",
    "{texts}\n\nAnswer from the texts above: what does {name} do?",
    "Rewrite this for a beginner:\n\n{text}",
    "List the main points of this text.\n\n{text}",
)


def stdlib_tasks() -> list[Document]:
    """Questions with long texts, one of each kind about each description; about 4,000, in an order
    that their text decides, so that the first ones are a fair sample of all. A description is in
    several of them: hold none out."""
    found, tasks = list(_descriptions()), []
    for index, (name, text) in enumerate(found):
        for number, question in enumerate(QUESTIONS):
            rng = random.Random(f"{index} {number}")
            texts = [text, *(other.text for other in rng.sample(found, 2))]
            rng.shuffle(texts)
            asked = question.format(text=text, texts="\n\n".join(texts), name=name)
            tasks.append(Document(name, asked))
    return sorted(tasks, key=lambda task: uniform(task.text))


def _descriptions() -> Iterator[Document]:
    """Docstrings of one to six paragraphs of prose, as they stand in the library, each once."""
    for document in {text: Document(name, text) for name, text in _docstrings()}.values():
        if 400 <= len(document.text) <= 2500 and ">>>" not in document.text:
            yield document


def _docstrings() -> Iterator[tuple[str, str]]:
    for document in stdlib_code():
        with suppress(SyntaxError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for node in ast.walk(ast.parse(document.text)):
                if isinstance(node, DESCRIBED) and (text := ast.get_docstring(node)):
                    module = document.name.removesuffix(".py").replace(os.sep, ".")
                    name = getattr(node, "name", module)
                    if not name.startswith("_"):
                        yield name, text


def held_out(document: Document, share: float = 0.1) -> bool:
    """True when the document belongs to the evaluation part: decided by its name alone, so it never
    moves."""
    return uniform(document.name) < share
