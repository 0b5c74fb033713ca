"""Grammar of the texts that a request allows, as a plain value. Torch-free; `grammar_matcher.py`
makes it a mask over tokens."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.errors import UserError

# JSON as chat templates write it: any space between its parts would let a model go on with space
# for ever.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
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
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON that is valid under `schema`, written as chat templates write it unless the schema's
        own `x-guidance` says otherwise; objects have their properties in the schema's order."""
        own = schema.get("x-guidance", {})
        written = WRITTEN | own if isinstance(own, dict) else own
        return cls("json_schema", json.dumps({**schema, "x-guidance": written}))

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
                f"grammar is a choice between {reprlib.repr(list(texts))}; give at least one text, "
                "none of them empty"
            )
        # One terminal: as a rule each text would be an item of the parser, which takes 2,000.
        return cls("lark", "start: TEXT\nTEXT: " + " | ".join(json.dumps(text) for text in texts))

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
