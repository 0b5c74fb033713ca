"""Prompts to measure with, from a file or from the standard library's text."""

from __future__ import annotations

import itertools
import random
from typing import Any

from draftsmith.errors import UserError
from draftsmith.prompts.corpus import CORPORA, held_out
from draftsmith.prompts.shapes import Row
from draftsmith.prompts.sources import read_rows

Prompt = dict[str, Any]  # {"prompt": text} or {"messages": [...]}


def read_prompts(source: str, *, count: int, chars: int, seed: int) -> list[Prompt]:
    """`count` prompts, in the order of a file (repeated if it is short) or drawn from a built-in
    corpus's held-out part."""
    if count < 1:
        raise UserError(f"num_prompts is {count}; it must be at least 1")
    prompts = _cut(source, count, chars, seed) if source in CORPORA else _read(source, count)
    return [prompts[index % len(prompts)] for index in range(count)]


def _cut(source: str, count: int, chars: int, seed: int) -> list[Prompt]:
    documents = [
        document
        for document in CORPORA[source]()
        if held_out(document) and len(document.text) > 2 * chars
    ]
    generator = random.Random(seed)
    prompts = []
    for _ in range(count):
        text = generator.choice(documents).text
        begin = generator.randrange(len(text) - 2 * chars + 1)
        line = text.find("\n", begin) + 1  # start at a line of its own
        prompts.append({"prompt": text[line : line + chars]})
    return prompts


def _read(source: str, count: int) -> list[Prompt]:
    """The first `count` questions of a file or folder."""
    rows = (_question(row, where) for where, row in read_rows(source))
    prompts = list(itertools.islice(filter(None, rows), count))
    if not prompts:
        raise UserError(f"prompts {source!r} hold no question; give at least one")
    return prompts


def _question(row: Row, where: str) -> Prompt | None:
    """Question of a row: of a conversation that ends in an answer, its first question."""
    if "messages" not in row:
        if "prompt" not in row:
            raise UserError(f"{where} holds a text and neither `prompt` nor `messages`; add one")
        return {"prompt": row["prompt"]} if row["prompt"].strip() else None
    turns = row["messages"]
    if turns[-1]["role"] != "assistant":
        return row
    asked = list(itertools.takewhile(lambda turn: turn["role"] != "assistant", turns))
    if [turn["role"] for turn in asked] == ["user"] and row.keys() == {"messages"}:
        text = asked[0].get("content")
        if isinstance(text, str):
            return {"prompt": text} if text.strip() else None
    return {**row, "messages": asked} if asked else None
