"""Request bodies as a stranger may send them, each from the seed of its own: formats of answers,
tools and parameters that are right, odd, deep, large or broken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

LETTERS = [
    "a", "b", "x", "é", "\u4e2d", "\U0001f600", "\u200b", "\n", "\t", '"', "\\", "\0", "\ud83d",
    " ",
]  # fmt: skip
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
FORMATS = [
    "date-time", "date", "time", "email", "uri", "uuid", "ipv4", "ipv6", "hostname", "duration",
    "odd",
]  # fmt: skip

NUMBERS = [
    0, 1, -1, 2, 7, 64, 0.5, 1e300, -1e-300, 2**31, 2**63, -(2**64), 10**30, 1.0, float("nan"),
    float("inf"),
]  # fmt: skip
BROKEN_REGEX = [
    "(", ")", "[", "{", "*", "\\", "(?=a)", "\\1", "(?<n>a)", "{9,1}", "\\p{Zz", "^", "$",
]  # fmt: skip
REGEX_LEAVES = [
    "a", "b", ".", "[a-z]", "[^ab]", "\\d", "\\w+", "\\s", "\\p{L}", "é", "\\x41", "\\u{1F600}",
    "(?i:ab)", "\\b", "[\\s\\S]", "[^\\s\\S]", "[[:alpha:]]", "[a&&b]",
]  # fmt: skip
ATTRIBUTES = [
    "[capture]", "[lazy]", "[max_tokens=3]", '[stop="x"]', '[suffix="x"]', "[temperature=0.5]",
    '[stop=""]', "[max_tokens=0]", '[capture="n"]', "[odd]",
]  # fmt: skip


class MadeUp:
    """All that one seed gives."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        # A few are as hostile as they can be made: most of the time would be theirs.
        self.large = self.random.random() < 0.002

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def count(self, most: int) -> int:
        """Small ones mostly."""
        return self.random.randint(0, self.random.randint(0, most))

    def one(self, *choices: Any) -> Any:
        chosen = self.random.choice(choices)
        return chosen() if callable(chosen) else chosen

    def text(self) -> str:
        return "".join(self.random.choice(LETTERS) for _ in range(self.count(8)))

    def word(self) -> str:
        return self.random.choice("abcde") + "".join(
            self.random.choice("abc012") for _ in range(self.count(4))
        )

    def number(self) -> Any:
        return self.one(*NUMBERS)

    def value(self, depth: int = 3) -> Any:
        leaves: list[Any] = [None, True, False, "", self.number, self.text, self.word]
        if depth == 0 or self.chance(0.4):
            return self.one(*leaves)
        return self.one(
            lambda: [self.value(depth - 1) for _ in range(self.count(4))],
            lambda: {self.text(): self.value(depth - 1) for _ in range(self.count(4))},
        )

    # Regular expressions

    def regex(self, depth: int = 4) -> str:
        if self.large:
            return self.one(
                lambda: (
                    self.random.choice(["a?", "[ab]?", "(a|b)?", "a{0,9}"])
                    * self.random.randint(500, 20_000)
                ),
                lambda: "(" * 2000 + "a" + ")*" * 2000,
                lambda: (
                    f"({self.regex_part(0)}{{{self.random.randint(100, 1000)}}}){{{self.random.randint(100, 1000)}}}"
                ),
                lambda: "|".join(self.regex_part(0) for _ in range(3000)),
            )
        parts = [self.regex_part(depth) for _ in range(self.count(4) + 1)]
        whole = self.one("", "", "", "|").join(parts)
        if self.chance(0.1):
            at = self.random.randint(0, len(whole))
            whole = whole[:at] + self.one(*BROKEN_REGEX) + whole[at:]
        return whole

    def regex_part(self, depth: int) -> str:
        leaf = self.one(*REGEX_LEAVES)
        if depth > 0 and self.chance(0.4):
            leaf = f"{self.one('(', '(?:', '(?s:')}{self.regex(depth - 1)})"
        return leaf + self.one(
            "", "", "", "?", "*", "+", "*?", "{2}", "{1,3}", "{0,20}", "{,3}", "{30,}", "{200}"
        )

    # Grammars in Lark's syntax

    def lark(self) -> str:
        if self.large:
            count = self.random.randint(1000, 6000)
            rule = self.one("a{}", '"(" a{} ")"', "[a{}]", 'a{} | "x"', "a{} a{}", "(a{})*")
            lines = [f"a{at}: " + rule.replace("{}", str(at + 1)) for at in range(count)]
            return "\n".join(["start: a0", *lines, f'a{count}: "x"'])
        rules = [f"r{at}" for at in range(self.count(5))]
        terminals = [f"T{at}" for at in range(self.count(4))]
        names = ["start", *rules, *terminals]
        lines = [f"start{self.attributes()}: {self.alternatives(names, 3)}"]
        lines += [f"{name}{self.attributes()}: {self.alternatives(names, 3)}" for name in rules]
        lines += [
            f"{name}{self.attributes()}: {self.alternatives(terminals, 2)}" for name in terminals
        ]
        if self.chance(0.2):
            lines.append(
                self.one(
                    "%ignore /[ \\t]+/",
                    "%import common.INT",
                    "%ignore T0",
                    "%llguidance {}",
                    "%declare X",
                    f"%ignore /{self.regex(1)}/",
                    "%llguidance " + json.dumps(self.value(2)),
                )
            )
        self.random.shuffle(lines)
        whole = "\n".join(lines)
        if self.chance(0.15):
            at = self.random.randint(0, len(whole))
            whole = (
                whole[:at]
                + self.one(
                    "(", ")", "|", '"', "/", "@x", "<[1]>", "%json", "\0", ":", "&", "~", "é", "["
                )
                + whole[at:]
            )
        return whole

    def attributes(self) -> str:
        if self.chance(0.9):
            return ""
        return self.one(*ATTRIBUTES)

    def alternatives(self, names: list[str], depth: int) -> str:
        many = [
            " ".join(self.symbol(names, depth) for _ in range(self.count(3) + 1))
            for _ in range(self.count(3) + 1)
        ]
        return " | ".join(many)

    def symbol(self, names: list[str], depth: int) -> str:
        kinds: list[Any] = [
            lambda: json.dumps(self.word()), lambda: json.dumps(self.text()), lambda: f"/{self.regex(1)}/",
            lambda: self.random.choice(names) if names else '"x"',
        ]  # fmt: skip
        if depth > 0:
            kinds += [
                lambda: f"({self.alternatives(names, depth - 1)})",
                lambda: f"[{self.alternatives(names, depth - 1)}]",
            ]
        if self.chance(0.05):
            kinds = [
                lambda: "%json " + json.dumps(self.schema(1)),
                "<[5]>",
                "<[0-9]>",
                "<[*]>",
                "<|im_end|>",
                "<odd>",
                '"a".."z"',
                '"a"i',
                "~/a/",
                "/a/ & /b/",
                "@part",
                '%regex {"substring_words": "a b"}',
            ]
        return self.one(*kinds) + self.one("", "", "", "?", "*", "+", "~3", "{1,4}", "{3}", "{2,}")

    # JSON schemas

    def schema(self, depth: int = 3) -> Any:
        if depth == 3 and self.large:
            return self.one(self.chained, self.nested, self.wide)
        if depth == 0 or self.chance(0.05):
            return self.one(
                {},
                True,
                False,
                {"type": "integer"},
                {"type": "string"},
                {"const": 1},
                lambda: self.value(1),
            )
        found: dict[str, Any] = {}
        for _ in range(self.count(4) + 1):
            name, make = self.random.choice(self.keywords(depth))
            found[name] = make()
        if depth == 3:
            parts = {f"d{at}": self.schema(1) for at in range(self.count(4))}
            found |= {self.one("$defs", "$defs", "definitions"): parts} if parts else {}
        return found

    def keywords(self, depth: int) -> list[tuple[str, Callable[[], Any]]]:
        def inner() -> Any:
            return self.schema(depth - 1)

        def some() -> list[Any]:
            return [inner() for _ in range(self.count(3) + self.chance(0.9))]

        def named() -> dict[str, Any]:
            return {self.one(self.word, self.text): inner() for _ in range(self.count(3))}

        types = ["object", "array", "string", "number", "integer", "boolean", "null", "odd"]
        return [
            ("type", lambda: self.one(*types, lambda: self.random.sample(types, 2))),
            ("type", lambda: self.one("object", "array", "string", "integer")),
            ("properties", named), ("properties", named), ("patternProperties", lambda: {self.regex(1): inner()}),
            ("additionalProperties", inner), ("propertyNames", inner), ("required", lambda: [self.word() for _ in range(self.count(3))]),
            ("items", inner), ("items", some), ("prefixItems", some), ("minItems", self.number), ("maxItems", lambda: self.count(9)), ("uniqueItems", lambda: True),
            ("enum", lambda: [self.value(2) for _ in range(self.count(5) + 1)]), ("const", lambda: self.value(2)),
            ("anyOf", some), ("oneOf", some), ("allOf", some), ("not", inner), ("if", inner), ("then", inner),
            ("pattern", self.regex), ("format", lambda: self.random.choice(FORMATS)), ("minLength", lambda: self.count(9)), ("maxLength", self.number),
            ("minimum", self.number), ("maximum", self.number), ("exclusiveMinimum", self.number), ("multipleOf", self.number),
            ("$ref", lambda: self.one("#", "#/$defs/d0", "#/$defs/d1", "#/definitions/d0", "#/properties/a", "#/%", "http://x/y", "#/$defs/none", "", self.value)),
            ("$anchor", self.word), ("$id", self.word), ("$schema", lambda: self.one("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema", self.text)),
            ("x-guidance", lambda: self.one({"whitespace_flexible": True}, {"whitespace_pattern": self.regex(1)}, {"lenient": True}, {"item_separator": self.text()}, {"coerce_one_of": True}, lambda: self.value(2))),
            (self.word(), lambda: self.value(2)),
        ]  # fmt: skip

    def chained(self) -> dict[str, Any]:
        count, keyword = (
            self.random.randint(500, 4000),
            self.one("items", "additionalProperties", "anyOf", "allOf", "oneOf", "properties", ""),
        )
        parts: dict[str, Any] = {}
        for at in range(count):
            next = {"$ref": f"#/$defs/d{at + 1}"}
            held: Any = (
                [next]
                if keyword.endswith("Of")
                else {"p": next}
                if keyword == "properties"
                else next
            )
            parts[f"d{at}"] = {keyword: held} if keyword else next
        return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{count}": {}}}

    def nested(self) -> Any:
        found: Any = {}
        for _ in range(self.random.randint(60, 400)):
            found = self.one(
                {"items": found}, {"anyOf": [found]}, {"properties": {"p": found}}, {"not": found}
            )
        return found

    def wide(self) -> Any:
        count = self.random.randint(200, 4000)
        return self.one(
            {"enum": [self.word() for _ in range(count)]},
            {"type": "object", "properties": {f"k{at}": {"type": "integer"} for at in range(count)}},
            {"anyOf": [{"type": "object", "required": [f"k{at}"]} for at in range(count)]},
            {"type": "string", "maxLength": count * 100}, {"type": "array", "minItems": count},
        )  # fmt: skip

    # Bodies

    def request(self) -> tuple[str, bytes]:
        path = self.random.choices(PATHS, (5, 5, 3, 0.5, 0.5))[0]
        body = self.body(path)
        # The most deeply nested of these is no JSON that Python writes.
        text = json.dumps(body)
        if self.chance(0.06):
            at = self.random.randint(0, len(text))
            text = self.one(
                text[:at],
                text[:at]
                + self.one("{", "]", ",", "\\", "nul", "1e999", "\x00", "\\ud800")
                + text[at:],
                "",
                "[]",
                "null",
                '"x"',
                "[" * 5000,
                '{"a":' * 5000,
                "9" * 5000,
            )
        encoded = text.encode("utf-8", "surrogatepass")
        if self.chance(0.03):
            at = self.random.randint(0, len(encoded))
            encoded = encoded[:at] + bytes([self.random.randrange(256)]) + encoded[at + 1 :]
        return path, encoded

    def body(self, path: str) -> dict[str, Any]:
        if path == "/detokenize":
            return {"tokens": [self.one(5, 6, 287, self.number) for _ in range(self.count(6))]}
        chat = path == "/v1/chat/completions" or (path == "/tokenize" and self.chance(0.5))
        body: dict[str, Any] = {"input": self.input()} if path == "/v1/responses" else {}
        if chat:
            body["messages"] = self.messages()
        elif not body:
            body["prompt"] = self.one(
                "x", "ab", self.word, self.text, lambda: [5, 6], lambda: ["x", "y"], self.value
            )
        if path == "/tokenize":
            return body | self.odd()
        body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = (
            self.random.randint(1, 4)
        )
        if self.chance(0.6):
            body |= self.format(path)
        if path != "/v1/completions" and self.chance(0.25):
            body |= self.tools(path)
        body |= (
            {name: make() for name, make in self.random.sample(self.parameters(), self.count(3))}
            if path != "/v1/responses"
            else {}
        )
        return body | self.odd()

    def odd(self) -> dict[str, Any]:
        """Now and then a field of any name with any value."""
        if self.chance(0.85):
            return {}
        names = [
            "n", "stop", "temperature", "seed", "logprobs", "messages", "prompt", "tools",
            "tool_choice", "response_format", "structured_outputs", "stream", "speculation",
            "metadata", "bad_words", "max_tokens", "logit_bias", "chat_template_kwargs", "text",
            "input",
        ]  # fmt: skip
        return {self.one(*names, self.word): self.value() for _ in range(self.count(2) + 1)}

    def parameters(self) -> list[tuple[str, Callable[[], Any]]]:
        return [
            ("temperature", lambda: self.one(0, 0.7, 1, self.number)), ("seed", lambda: self.one(1, self.number)),
            ("stop", lambda: self.one(self.word, lambda: [self.text()])), ("n", lambda: self.one(1, 2, 3)), ("stream", lambda: True),
            ("logprobs", lambda: self.one(True, 1, 0)), ("top_p", lambda: self.one(0.9, self.number)), ("speculation", lambda: {"k": self.one(0, 3, self.number)}),
            ("logit_bias", lambda: {"5": self.one(-100, 100)}), ("bad_words", lambda: [self.text()]), ("ignore_eos", lambda: True),
            ("allowed_token_ids", lambda: [5, 6, 7]), ("repetition_penalty", lambda: 1.2), ("min_tokens", lambda: 1), ("truncate_prompt_tokens", lambda: self.one(-1, 2)),
        ]  # fmt: skip

    def messages(self) -> list[Any]:
        return [
            self.one(
                {"role": "user", "content": "x"},
                {"role": "user", "content": self.text()},
                {"role": "assistant", "content": "y"},
                lambda: {"role": self.one("user", "tool", "odd"), "content": self.value()},
            )
            for _ in range(self.count(2) + 1)
        ]

    def input(self) -> Any:
        return self.one("x", self.word, lambda: [{"role": "user", "content": "x"}], self.value)

    def format(self, path: str) -> dict[str, Any]:
        if path == "/v1/responses":
            return {
                "text": {
                    "format": self.one(
                        {"type": "json_object"},
                        lambda: {"type": "json_schema", "name": "n", "schema": self.schema()},
                        self.value,
                    )
                }
            }
        schema = self.schema
        return self.one(
            {"response_format": {"type": "json_object"}},
            lambda: {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema()}}},
            lambda: {"structured_outputs": {"json": self.one(schema, lambda: json.dumps(schema()))}},
            lambda: {"structured_outputs": {"regex": self.regex()}}, lambda: {"structured_outputs": {"grammar": self.lark()}},
            lambda: {"structured_outputs": {"choice": [self.one(self.word, self.text) for _ in range(self.count(4))]}},
            lambda: {"structured_outputs": {"structural_tag": self.value()}},
        )  # fmt: skip

    def tools(self, path: str) -> dict[str, Any]:
        def tool() -> dict[str, Any]:
            function = {
                "name": self.one("f", "g", self.word),
                "parameters": self.one(
                    self.schema,
                    {"type": "object"},
                    lambda: {"type": "object", "properties": {"a": self.schema(2)}},
                ),
                "strict": self.one(True, False),
            }
            return (
                {"type": "function", **function}
                if path == "/v1/responses"
                else {"type": "function", "function": function}
            )

        choice = self.one("auto", "required", "none", "required", self.value)
        return {"tools": [tool() for _ in range(self.count(2) + 1)], "tool_choice": choice}
