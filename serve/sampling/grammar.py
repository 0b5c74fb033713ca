"""Grammar of the texts that a request allows, as a plain value. Torch-free; `grammar_matcher.py`
makes it a mask over tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.errors import UserError

Kind = Literal["json_schema", "regex", "lark", "combined"]


@dataclass(frozen=True)
class Grammar:
    """The answer's whole text, without its end-of-sequence token, is one that `source`
    describes."""

    kind: Kind
    source: str

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that is valid under `schema`; objects have their properties in the
        schema's order."""
        return cls("json_schema", json.dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that `pattern` matches from beginning to end (Rust's syntax: no look-around, no
        back-references)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of `texts`."""
        if not texts or "" in texts:
            raise UserError(
                f"grammar is a choice between {list(texts)}; give at least one text, none of them "
                "empty"
            )
        return cls("lark", "start: " + " | ".join(json.dumps(text) for text in texts))

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """A context-free grammar in Lark's syntax, as llguidance reads it; its rule is `start`."""
        return cls("lark", source)

    @classmethod
    def combined(cls, rules: str, parts: Mapping[str, Grammar]) -> Grammar:
        """Rules in Lark's syntax that name other grammars: `@answer` is a text of
        `parts["answer"]`."""
        named = {name: [part.kind, part.source] for name, part in parts.items()}
        return cls("combined", json.dumps([rules, named]))
