"""Formats of answers (`response_format`, `structured_outputs`) and the grammars they compile to;
the strict base of all request bodies."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from draftsmith.serve.sampling.grammar import Grammar

T = TypeVar("T")


def writable(value: T) -> T:
    """The value, if it can be written as JSON again: Python reads more than may be written."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "it holds half a surrogate pair, which is no text; mend its encoding"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be written as JSON ({error}); mend it") from error
    return value


Text = Annotated[str, AfterValidator(writable)]
JsonObject = Annotated[dict[str, Any], AfterValidator(writable)]


class StrictModel(BaseModel):
    """Part of a request body: no value is converted, no key ignored. To give null is to leave a key
    out, one that is not known here too."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, body: Any) -> Any:
        if not isinstance(body, dict) or None not in body.values():
            return body
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in body.items() if value is not None or key in known}


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
    schema_: JsonObject = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None  # true or not, the schema is always held


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(StrictModel):
    """vLLM's field: exactly one of `KINDS`. A grammar is in Lark's syntax."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    json_: JsonObject | Text | None = Field(None, alias="json")
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
        schema = writable(json.loads(text))
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


class FormatFields(StrictModel):
    """Formats of the answer, at most one. `guided_json` and its like are vLLM's former names of
    `structured_outputs`."""

    response_format: Annotated[ResponseFormat, Field(discriminator="type")] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | Text | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None

    @field_validator("guided_json")
    @classmethod
    def _is_a_schema(cls, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
        try:
            return _parsed(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError("it is a text that is no JSON object; give a schema") from error

    @model_validator(mode="after")
    def _one_format(self) -> FormatFields:
        if len(given := self._formats()) > 1:
            raise ValueError(f"{given[1]} is given together with {given[0]}; choose one of them")
        return self

    def _formats(self) -> list[str]:
        return [name for name in FormatFields.model_fields if getattr(self, name) is not None]

    def format_name(self) -> str:
        """Name of the field that gives the format; `response_format` where none does."""
        return next(iter(self._formats()), "response_format")

    def answer_grammar(self) -> Grammar | None:
        if isinstance(self.guided_json, dict):
            return Grammar.json_schema(self.guided_json)
        if self.guided_regex is not None:
            return Grammar.regex(self.guided_regex)
        if self.guided_choice is not None:
            return Grammar.choice(self.guided_choice)
        if self.guided_grammar is not None:
            return Grammar.lark(self.guided_grammar)
        return grammar_of(self.response_format, self.structured_outputs)
