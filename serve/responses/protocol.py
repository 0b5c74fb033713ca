"""Request bodies of the Responses API. A parameter that is not honoured exactly is refused
with 400."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from draftsmith.serve.bodies.accepted import AcceptedFields, Off
from draftsmith.serve.bodies.formats import (
    JsonObject,
    JsonObjectFormat,
    StrictModel,
    Text,
    TextFormat,
)
from draftsmith.serve.bodies.tools import Name
from draftsmith.serve.http.protocol import Speculation


class TextContent(StrictModel):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[JsonObject] | None = None
    logprobs: list[JsonObject] | None = None


class Item(StrictModel):
    """Part of the input. Items of an earlier answer come back with what a client was sent."""

    id: Text | None = None
    status: Text | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | list[TextContent]


class CallItem(Item):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: Text | list[TextContent]


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: list[JsonObject] = Field(default_factory=list)
    content: list[ReasoningText] | None = None


InputItem = MessageItem | CallItem | CallOutputItem | ReasoningItem


class ResponseFunctionTool(StrictModel):
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ResponseNamedChoice(StrictModel):
    type: Literal["function"]
    name: Text


class SchemaFormat(StrictModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    type: Literal["json_schema"]
    name: Text
    schema_: JsonObject = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextOptions(StrictModel):
    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Text | None = None


class ReasoningOptions(StrictModel):
    effort: Text | None = None
    summary: Text | None = None  # nothing is summed up: the whole reasoning is in the answer
    generate_summary: Text | None = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: Off | None = None


class ResponsesRequest(AcceptedFields):
    model: Text | None = None
    input: Text | Annotated[list[InputItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextOptions | None = None
    tools: list[ResponseFunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    # encrypted reasoning is asked for by clients that send it back; here it is sent as it is
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Off | None = None
    previous_response_id: None = None
    conversation: None = None
    # as in chat requests
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    chat_template_kwargs: JsonObject | None = None
    speculation: Speculation = Field(default_factory=Speculation)
    request_class: Annotated[Text, Field(max_length=128)] = ""

    @field_validator("previous_response_id", "conversation", mode="before")
    @classmethod
    def _is_not_stored(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError(
                "this server stores no responses; send the whole conversation as input"
            )
        return value
