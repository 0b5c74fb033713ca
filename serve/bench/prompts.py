"""Prompts to measure with, from a file or from the standard library's text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from draftsmith.corpus import CORPORA, held_out
from draftsmith.errors import UserError

Prompt = dict[str, Any]  # {"prompt": text} or {"messages": [...]}


def read_prompts(source: str, *, count: int, chars: int, seed: int) -> list[Prompt]:
    """`count` prompts, in the order of a file (repeated if it is short) or drawn from a built-in
    corpus's held-out part."""
    if count < 1:
        raise UserError(f"num_prompts is {count}; it must be at least 1")
    prompts = _cut(source, count, chars, seed) if source in CORPORA else _read(Path(source))
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


def _read(path: Path) -> list[Prompt]:
    if not path.is_file():
        known = ", ".join(CORPORA)
        raise UserError(
            f"prompts {str(path)!r} is no file; give JSONL, plain text, or one of {known}"
        )
    if path.suffix == ".json":
        return _conversations(path)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise UserError(f"prompts {str(path)!r} is empty; give at least one prompt")
    if path.suffix == ".jsonl":
        return [_entry(path, number, line) for number, line in enumerate(lines, 1)]
    return [{"prompt": line} for line in lines]


def _conversations(path: Path) -> list[Prompt]:
    """ShareGPT's layout, [{"conversations": [{"from": "human", "value": text}, ...]}, ...]; a first
    human turn is a prompt."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        turns = [
            [turn["value"] for turn in entry["conversations"] if turn["from"] in ("human", "user")]
            for entry in entries
        ]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"prompts {str(path)!r} is no ShareGPT-like JSON ({error!r}); mend it or give JSONL"
        ) from error
    prompts = [{"prompt": human[0]} for human in turns if human and human[0].strip()]
    if not prompts:
        raise UserError(f"prompts {str(path)!r} holds no human turn; give at least one")
    return prompts


def _entry(path: Path, number: int, line: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"line {number} of {str(path)!r} is not valid JSON ({error.msg}); mend it"
        ) from error
    for key in ("messages", "prompt"):
        if isinstance(entry, dict) and key in entry:
            return {key: entry[key]}
    raise UserError(f"line {number} of {str(path)!r} has neither `prompt` nor `messages`; add one")
