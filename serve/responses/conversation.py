"""Requests of the Responses API as chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from draftsmith.serve.http.errors import validation_refusal
from draftsmith.serve.http.protocol import ChatRequest
from draftsmith.serve.responses.protocol import (
    CallItem,
    CallOutputItem,
    InputItem,
    MessageItem,
    ResponseFunctionTool,
    ResponseNamedChoice,
    ResponsesRequest,
    SchemaFormat,
    TextContent,
)

# Parameters that are the same in both APIs.
SHARED = (
    "model", "temperature", "top_p", "parallel_tool_calls", "seed", "chat_template_kwargs",
    "speculation", "request_class",
)  # fmt: skip
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


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The chat request that asks for the same; raises `Refusal` where there is none."""
    # Not by pydantic's dump, which raises for what is nested deeper than 255.
    shared = {name: value for name, value in body if name in SHARED and value is not None}
    fields: dict[str, Any] = {
        "messages": messages_of(body),
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in body.tools or ()],
        "tool_choice": _choice(body),
        "response_format": _format(body),
        "verbosity": None if body.text is None else body.text.verbosity,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "stream": body.stream,
    }
    try:
        return ChatRequest.model_validate(shared | fields)
    except ValidationError as error:
        refusal = validation_refusal(RequestValidationError(error.errors()))
        refusal.param = NAMES.get(refusal.param or "", refusal.param)
        raise refusal from error


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
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


def _add(messages: list[dict[str, Any]], item: InputItem) -> None:
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


def _assistant(messages: list[dict[str, Any]], fresh: Sequence[str] = ()) -> dict[str, Any]:
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
