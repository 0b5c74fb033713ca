"""Request bodies of the Responses API, and the chat requests that ask for the same. A parameter
that is not honoured exactly is refused with 400."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError, field_validator

from draftsmith.serve.http.bodies import (
    Function,
    JsonObject,
    JsonObjectFormat,
    JsonSchema,
    Many,
    NamedFunction,
    Off,
    StrictModel,
    Text,
    TextFormat,
)
from draftsmith.serve.http.errors import validation_refusal
from draftsmith.serve.http.protocol import AnswerFields, ChatRequest


class TextContent(StrictModel):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Many[JsonObject] | None = None
    logprobs: Many[JsonObject] | None = None


class Item(StrictModel):
    """Part of the input. Items of an earlier answer come back with what a client was sent."""

    id: Text | None = None
    status: Text | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Many[TextContent]


class CallItem(Item):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Many[TextContent]


class ReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Many[JsonObject] = Field(default_factory=list)
    content: Many[ReasoningText] | None = None


InputItem = MessageItem | CallItem | CallOutputItem | ReasoningItem


class ResponseFunctionTool(Function):
    type: Literal["function"]


class ResponseNamedChoice(NamedFunction):
    type: Literal["function"]


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


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


class ResponsesRequest(AnswerFields):
    input: Text | Annotated[Many[InputItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    tools: Many[ResponseFunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    # encrypted reasoning is asked for by clients that send it back; here it is sent as it is
    include: Many[Literal["reasoning.encrypted_content"]] | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Off | None = None
    previous_response_id: None = None
    conversation: None = None
    chat_template_kwargs: JsonObject | None = None  # as in chat requests

    @field_validator("previous_response_id", "conversation", mode="before")
    @classmethod
    def _is_not_stored(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("this server stores no responses; send the whole chat as input")
        return value


# Name of each chat parameter in this API, where it is another one.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
    "reasoning_effort": "reasoning",
}


class ChatOfResponse(ChatRequest):
    def api_name(self, name: str) -> str:
        name = super().api_name(name)
        return NAMES.get(name, name)


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The chat request that asks for the same; raises `Refusal` where there is none."""
    # Not by pydantic's dump, which raises for what is nested deeper than 255.
    shared = {name: value for name, value in body if name in AnswerFields.model_fields}
    fields: dict[str, Any] = {
        "messages": messages_of(body),
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in body.tools or ()],
        "tool_choice": _choice(body),
        "response_format": _format(body),
        "verbosity": None if body.text is None else body.text.verbosity,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    try:
        return ChatOfResponse.model_validate(shared | fields)
    except ValidationError as error:
        refusal = validation_refusal(RequestValidationError(error.errors()))
        refusal.param = NAMES.get(refusal.param or "", refusal.param)
        raise refusal from error


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: Many[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        _add(messages, item)
    for message in messages:
        # Reasoning without an answer, the last of an answer that was cut off.
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _add(messages: Many[dict[str, Any]], item: InputItem) -> None:
    """Items of one answer are one message: its reasoning, then its text, then its calls."""
    if isinstance(item, CallOutputItem):
        output = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        messages.append(output)
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif not isinstance(item, MessageItem):
        thoughts = "".join(part.text for part in item.content or ())
        if thoughts:
            messages.append({"role": "assistant", "reasoning_content": thoughts})
    elif item.role == "assistant":
        message = _assistant(messages, fresh=("content", "tool_calls"))
        message["content"] = _text(item.content)
    else:
        messages.append({"role": item.role, "content": _text(item.content)})


def _assistant(messages: Many[dict[str, Any]], fresh: Sequence[str] = ()) -> dict[str, Any]:
    """The assistant's message at the end; a new one where there is none, or where it has what
    `fresh` names."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or any(name in last for name in fresh):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: str | list[TextContent]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(tool: ResponseFunctionTool) -> dict[str, Any]:
    function = {name: value for name, value in tool if name != "type" and value is not None}
    return {"type": tool.type, "function": function}


def _choice(body: ResponsesRequest) -> Any:
    if isinstance(body.tool_choice, ResponseNamedChoice):
        return {"type": "function", "function": {"name": body.tool_choice.name}}
    return body.tool_choice


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    format = None if body.text is None else body.text.format
    if not isinstance(format, SchemaFormat):
        return None if format is None else {"type": format.type}
    schema = {"name": format.name, "schema": format.schema_}
    return {"type": format.type, "json_schema": schema}
