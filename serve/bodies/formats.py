"""Formats of answers (`response_format`, `structured_outputs`) and the grammars they compile to;
the strict base of all request bodies."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from draftsmith.serve.sampling.grammar import Grammar


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "it holds half a surrogate pair, which is no text; mend its encoding"
        ) from error
    return value


Text = Annotated[str, AfterValidator(_is_text)]


class StrictModel(BaseModel):
    """Part of a request body: no value is converted, no key ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)


KINDS = ("json", "regex", "choice", "grammar", "json_object")


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class JsonSchema(StrictModel):
    # "schema" would hide a method of pydantic's, which only warns about it.
    model_config = ConfigDict(
        extra="forbid", strict=True, protected_namespaces=(), populate_by_name=False
    )

    name: Text
    schema_: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None  # true or not, the schema is always held


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(StrictModel):
    """vLLM's field: exactly one of `KINDS`. A grammar is in Lark's syntax."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> StructuredOutputs:
        given = [kind for kind, value in zip(KINDS, self._values()) if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs holds {len(given)} of {', '.join(KINDS)}; give exactly one"
            )
        if isinstance(self.json_, str):
            _parsed(self.json_)
        return self

    def _values(self) -> tuple[object, ...]:
        return (self.json_, self.regex, self.choice, self.grammar, self.json_object)

    def to_grammar(self) -> Grammar:
        if self.json_ is not None:
            return Grammar.json_schema(
                _parsed(self.json_) if isinstance(self.json_, str) else self.json_
            )
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.choice is not None:
            return Grammar.choice(self.choice)
        if self.grammar is not None:
            return Grammar.lark(self.grammar)
        return Grammar.json_object()


def _parsed(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"structured_outputs.json is a text that is not JSON ({error}); mend it"
        ) from error
    if not isinstance(schema, dict):
        raise ValueError("structured_outputs.json is no JSON object; give a schema")
    return schema


def grammar_of(
    response_format: BaseModel | None, structured: StructuredOutputs | None
) -> Grammar | None:
    if structured is not None:
        return structured.to_grammar()
    if isinstance(response_format, JsonObjectFormat):
        return Grammar.json_object()
    if isinstance(response_format, JsonSchemaFormat):
        return Grammar.json_schema(response_format.json_schema.schema_)
    return None
