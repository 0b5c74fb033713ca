"""Parts of request bodies: the strict base of all; formats of answers (`response_format`,
`structured_outputs`) and the grammars they compile to; messages, as OpenAI has them and as chat
templates take them; tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from draftsmith.chats import RESERVED_VARIABLES, decoded, plain_message, plain_tool
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.tools.call_format import LONGEST_NAME, NAME_LETTERS, Tool

T = TypeVar("T")
# A list of which the first bad member is the error: one for each would be megabytes.
Many = Annotated[list[T], Field(fail_fast=True)]
DEEPEST = 200  # levels within levels; pydantic writes 255, a body's own included


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
    level: list[Any] = [value]
    for _ in range(DEEPEST + 1):
        level = [part for one in level if isinstance(one, (dict, list))
                 for part in (one.values() if isinstance(one, dict) else one)]  # fmt: skip
        if not level:
            return value
    raise ValueError(f"it is nested more than {DEEPEST} levels deep; send a flatter one")


Text = Annotated[str, AfterValidator(writable)]
JsonObject = Annotated[dict[str, Any], AfterValidator(writable)]


class StrictModel(BaseModel):
    """Part of a request body: no value is converted, no key ignored. To give null is to leave a key
    out, one that is not known here too. Of unknown ones the first is the error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, body: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if not isinstance(body, dict) or not (unknown := body.keys() - known):
            return body
        first = next((key for key in body if key in unknown and body[key] is not None), None)
        return {key: body[key] for key in body if key not in unknown or key == first}


# Kinds of formats by vLLM's names, as the grammars they are.
KINDS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
    "json_object": lambda _: Grammar.json_object(),
}


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class JsonSchema(StrictModel):
    name: Text
    # "schema" would hide a method of pydantic's, which only warns about it.
    schema_: JsonObject = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None  # true or not, the schema is always held


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(StrictModel):
    """vLLM's field: exactly one of `KINDS`. A grammar is in Lark's syntax."""

    json_: JsonObject | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Many[Text] | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> StructuredOutputs:
        if len(given := self._given()) != 1:
            raise ValueError(
                f"structured_outputs holds {len(given)} of {', '.join(KINDS)}; give exactly one"
            )
        return self

    @field_validator("json_")
    @classmethod
    def _is_schema(cls, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
        return _parsed(value) if isinstance(value, str) else value

    def _given(self) -> dict[str, Any]:
        values = (self.json_, self.regex, self.choice, self.grammar, self.json_object)
        return {kind: value for kind, value in zip(KINDS, values) if value is not None}

    def to_grammar(self) -> Grammar:
        ((kind, value),) = self._given().items()
        return KINDS[kind](value)


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


class FormatFields(StrictModel):
    """Formats of the answer, at most one."""

    response_format: Annotated[ResponseFormat, Field(discriminator="type")] | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _one_format(self) -> FormatFields:
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError(
                "structured_outputs is given together with response_format; choose one of them"
            )
        return self

    def format_name(self) -> str:
        """Name of the field that gives the format; `response_format` where none does."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def answer_grammar(self) -> Grammar | None:
        if self.structured_outputs is not None:
            return self.structured_outputs.to_grammar()
        if isinstance(self.response_format, JsonSchemaFormat):
            return Grammar.json_schema(self.response_format.json_schema.schema_)
        is_json = isinstance(self.response_format, JsonObjectFormat)
        return Grammar.json_object() if is_json else None


def _is_off(value: bool) -> bool:
    if value:
        raise ValueError("it is true, which is not supported; leave it out")
    return value


Off = Annotated[bool, AfterValidator(_is_off)]


class TextPart(StrictModel):
    type: Literal["text"]
    text: Text


class CalledFunction(StrictModel):
    name: Text
    arguments: Text | None = None

    @field_validator("arguments")
    @classmethod
    def _decode_to_text(cls, value: str | None) -> str | None:
        writable(decoded(value))
        return value


class MadeCall(StrictModel):
    """A tool call of an earlier answer."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of streamed calls that a client sends back


class MessageBody(StrictModel):
    role: Text
    content: Text | Many[TextPart] | None = None
    name: Text | None = None
    tool_calls: Many[MadeCall] | None = None  # of an assistant
    tool_call_id: Text | None = None  # of a tool
    reasoning_content: Text | None = None  # of an assistant
    reasoning: Text | None = None  # vLLM's name of it
    # of an assistant, where a client sends an answer back as it came
    annotations: Many[JsonObject] | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> MessageBody:
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning_content", "reasoning", "annotations"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"a message of role {self.role!r} has {name}, which only an assistant's "
                        "can have; leave it out"
                    )
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role 'tool' lacks its tool_call_id; give it")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(
                f"a message of role {self.role!r} has a tool_call_id, which only a tool's can "
                "have; leave it out"
            )
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(
                f"a message of role {self.role!r} has no content; only an assistant's with "
                "tool_calls may go without"
            )
        return self

    def plain(self) -> dict[str, Any]:
        return plain_message(self.model_dump())


class ConversationBody(StrictModel):
    """Messages, and options of the chat template that makes a prompt of them."""

    messages: Annotated[Many[MessageBody], Field(min_length=1)]
    add_generation_prompt: bool | None = None  # default: true unless the final message is continued
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _continues_or_prompts(self) -> ConversationBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "add_generation_prompt and continue_final_message are both true; choose one of them"
            )
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in RESERVED_VARIABLES:
            if name in (value or {}):
                raise ValueError(f"{name!r} is no variable of a chat template; leave it out")
        return value


Name = Annotated[Text, Field(pattern=f"^[{NAME_LETTERS}]{{1,{LONGEST_NAME}}}$")]


class Function(StrictModel):
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionTool(StrictModel):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return plain_tool(dict(self.function))

    def tool(self) -> Tool:
        return Tool(self.function.name, self.function.parameters or {}, bool(self.function.strict))


class NamedFunction(StrictModel):
    name: Text


class NamedChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class ToolChoice(NamedTuple):
    """Tools that an answer may call."""

    tools: tuple[Tool, ...] = ()  # none: whatever looks like a call is text
    forced: bool = False
    parallel: bool = True


class ToolFields(StrictModel):
    tools: Many[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: None = None
    function_call: None = None

    @field_validator("functions", "function_call", mode="before")
    @classmethod
    def _are_tools_now(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("it is OpenAI's former name; give tools and tool_choice in its place")
        return value

    @model_validator(mode="after")
    def _choice_names_a_tool(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"tools holds {twice!r} twice; give each function its own name")
        if isinstance(self.tool_choice, NamedChoice):
            if self.tool_choice.function.name not in names:
                raise ValueError(
                    f"tool_choice names {self.tool_choice.function.name!r}, which is none of "
                    f"tools {names}; name one of them"
                )
        elif self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required without tools; give tools or leave it out")
        return self

    def offered(self) -> list[FunctionTool]:
        """Tools that the model gets to see."""
        return [] if self.tool_choice == "none" else self.tools or []

    def choice(self) -> ToolChoice:
        tools = tuple(tool.tool() for tool in self.offered())
        if isinstance(self.tool_choice, NamedChoice):
            name = self.tool_choice.function.name
            named = tuple(tool for tool in tools if tool.name == name)
            return ToolChoice(named, forced=True, parallel=False)
        return ToolChoice(
            tools,
            forced=self.tool_choice == "required",
            parallel=self.parallel_tool_calls is not False,
        )
