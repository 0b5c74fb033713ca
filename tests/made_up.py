"""Request bodies as a stranger may send them, each from the seed of its own: sound ones, whose parts
are exchanged, repeated, nested, cut or broken."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
    "$defs": {"d0": {"type": ["string", "null"], "pattern": "^[a-z]{1,3}\\d?$"}, "d1": {"$ref": "#/$defs/d0"}},
    "properties": {
        "a": {"$ref": "#/$defs/d1"}, "b": {"type": "array", "items": {"type": "integer", "minimum": 0, "multipleOf": 2}, "minItems": 1, "maxItems": 3, "uniqueItems": True},
        "c": {"anyOf": [{"type": "number", "exclusiveMinimum": 0.5}, {"enum": [1, "x", None]}]}, "d": {"type": "string", "format": "date-time", "minLength": 1, "maxLength": 9},
        "e": {"oneOf": [{"const": 1}, {"not": {"type": "integer"}}]}, "f": {"if": {"type": "string"}, "then": {"maxLength": 2}, "allOf": [{"type": "string"}]},
    },
    "patternProperties": {"^x": {"type": "boolean"}}, "additionalProperties": False, "required": ["a"], "propertyNames": {"maxLength": 4},
    "x-guidance": {"whitespace_flexible": True, "item_separator": ", "},
}  # fmt: skip
LARK = """start: greeting (", " name)* END?
greeting[capture]: "Hi" | "Hé" | /[a-z]{2,3}/
name: WORD~1..3 | "(" name ")" | %json {"type": "integer"}
WORD: /\\p{Lu}[^\\s\\d]*/
END[stop=""]: "." | "a".."z"
%ignore /[ \\t]+/
%import common.INT
"""
REGEX = "(?i:ab)+?|[^x-z]{0,20}\\w*(\\p{L}|\\x41\\b|[[:alpha:]&&a])?"
TOOL = {"name": "f", "description": "g", "parameters": SCHEMA, "strict": True}
CHOSEN = {
    "temperature": 0.7, "seed": 1, "stop": ["x", "é"], "n": 2, "logprobs": 1, "top_p": 0.9,
    "speculation": {"k": 3}, "logit_bias": {"5": -100}, "bad_words": ["a"], "min_tokens": 1,
    "allowed_token_ids": [5, 6, 7], "repetition_penalty": 1.2, "truncate_prompt_tokens": 2,
}  # fmt: skip
ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]  # fmt: skip
SOUND: list[tuple[str, dict[str, Any]]] = [
    *(
        (COMPLETIONS, {"prompt": "ab", "structured_outputs": asked})
        for asked in (
            {"json": SCHEMA},
            {"json": json.dumps(SCHEMA)},
            {"regex": REGEX},
            {"grammar": LARK},
            {"choice": ["a", "bc"]},
            {"structural_tag": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
        )
    ),
    (COMPLETIONS, {"prompt": [5, 6], **CHOSEN}),
    (COMPLETIONS, {"prompt": ["x", "y"], "stream": True, "ignore_eos": True}),
    (CHAT, {"messages": ASKED, "response_format": {"type": "json_object"}, "logprobs": True}),
    (
        CHAT,
        {
            "messages": ASKED,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            },
        },
    ),
    (
        CHAT,
        {
            "messages": ASKED,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
        },
    ),
    (
        RESPONSES,
        {
            "input": ASKED[1:],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        },
    ),
    (RESPONSES, {"input": "x", "tools": [{"type": "function", **TOOL}], "tool_choice": "auto"}),
    ("/tokenize", {"messages": ASKED}),
    ("/detokenize", {"tokens": [5, 287]}),
]
ODD: list[Any] = [
    None, True, "", "odd", [], {}, 0, -1, 0.5, 2**31, 2**63, -(2**64), 10**30, 1e300, -1e-300,
    float("nan"), float("inf"), "\ud83d", "\0", "#/$defs/none", "http://x/y", "#", {"const": 1},
]  # fmt: skip
FRAGMENTS = [
    "(", ")", "[", "]", "{", "}", "*", "+?", "\\", "|", '"', "/", "~3", "{9,1}", "{200}", "(?=a)",
    "\\1", "(?<n>a)", "\\p{Zz", "^", "$", "\\u{1F600}", "<[*]>", "<|im_end|>", "%llguidance {}\n",
    "@x", "%json", "\0", "é", "\u4e2d", "\U0001f600", "\u200b", "\n", "start: start\n", "&", "[lazy]",
    "[max_tokens=0]",
]  # fmt: skip
BROKEN = ["", "[]", "null", '"x"', "[" * 5000, '{"a":' * 5000, "9" * 5000]


class MadeUp:
    """All that one seed gives."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        # A few are as hostile as they can be made: most of the time would be theirs.
        self.large = self.random.random() < 0.002

    def request(self) -> tuple[str, bytes]:
        path, sound = self.random.choice(SOUND)
        body = copy.deepcopy(sound)
        most = "max_output_tokens" if path == RESPONSES else "max_tokens"
        body |= {most: self.random.randint(1, 4)} if path.startswith("/v1/") else {}
        if self.large and path == COMPLETIONS:
            body["structured_outputs"] = self.chained()
        for _ in range(1 if self.large else self.random.choice((0, 1, 1, 2, 3, 5, 9))):
            self.change(body)
        text = json.dumps(body)
        if self.random.random() < 0.06:
            at = self.random.randrange(len(text))
            spoilt = text[:at] + self.random.choice(["", "{", "]", "nul", "1e999", "\x00"])
            text = self.random.choice([spoilt, spoilt + text[at:], *BROKEN])
        encoded = bytearray(text.encode("utf-8", "surrogatepass"))
        if encoded and self.random.random() < 0.03:
            encoded[self.random.randrange(len(encoded))] = self.random.randrange(256)
        return path, bytes(encoded)

    def change(self, body: dict[str, Any]) -> None:
        """One part, of any depth."""
        if not body:
            return
        holder, key = self.random.choice(list(places(body)))
        part = holder[key]
        if isinstance(part, str) and self.random.random() < 0.7:
            holder[key] = self.changed_text(part)
            return
        way = self.random.randrange(5)
        if way == 0:
            holder[key] = self.random.choice(ODD)
        elif way == 1:  # what stands elsewhere, in this body or another
            others = list(places(self.random.choice(SOUND)[1]))
            other, at = self.random.choice(others)
            holder[key] = copy.deepcopy(other[at])
        elif way == 2:
            del holder[key]
        elif way == 3:
            holder[key] = self.nested(part)
        elif isinstance(holder, list):
            holder.extend([part] * self.times())
        else:
            other, at = self.random.choice(list(places(SCHEMA)))
            name = at if isinstance(at, str) else "odd"
            holder |= {f"{name}{n or ''}": copy.deepcopy(other[at]) for n in range(self.times())}

    def changed_text(self, text: str) -> str:
        at, to = sorted(self.random.randint(0, len(text)) for _ in range(2))
        return self.random.choice(
            [
                text[:at] + self.random.choice(FRAGMENTS) + text[at:],
                text[:at] + text[to:],
                text[:at] + text[at:to] * self.times() + text[to:],
                f"({text})" + self.random.choice(["?", "*", "{0,9}", "{3}", "|b"]) * self.times(),
            ]
        )

    def chained(self) -> dict[str, Any]:
        count = self.times()
        parts = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
        rules = ["start: a0", *(f'a{n}: "(" a{n + 1} ")"' for n in range(count)), f'a{count}: "x"']
        return self.random.choice(
            [
                {"json": {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{count}": {}}}},
                {"json": {"enum": [f"{n}" for n in range(count)]}},
                {"grammar": "\n".join(rules)},
                {"regex": "(" * 2000 + "a" + ")*" * 2000},
                {"regex": "(a{100,900}){100,900}"},
            ]
        )

    def times(self) -> int:
        return self.random.randint(500, 4000) if self.large else self.random.choice((1, 2, 2, 3, 9))

    def nested(self, part: Any) -> Any:
        for _ in range(min(90, self.times())):
            way = self.random.choice(["items", "anyOf", "properties", "not", ""])
            held = {"anyOf": [part], "properties": {"p": part}}.get(way, part)
            part = {way: held} if way else [part]
        return part


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every part of a value by what holds it, and its key there."""
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(part, (dict, list)):
            yield from places(part)
