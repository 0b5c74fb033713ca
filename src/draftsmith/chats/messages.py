"""Messages and tools as chat templates take them, from requests and from rows of files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from draftsmith.errors import UserError

Message = dict[str, Any]
# A template reads one of them.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Parameters of apply_chat_template itself: they must not be set through the variables of a
# template.
RESERVED_VARIABLES = (
    "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip


class Conversation(NamedTuple):
    messages: list[Message]
    tools: list[dict[str, Any]]
    variables: dict[str, Any]  # of the chat template


def plain_message(given: Mapping[str, Any]) -> Message:
    """The message as templates take it.

    Raises:
        ValueError: it holds something other than text and calls.
    """
    message: Message = {"role": given["role"], "content": plain_text(given.get("content"))}
    if given.get("name") is not None:
        message["name"] = given["name"]
    calls = given.get("tool_calls") or [given[old] for old in ("function_call",) if given.get(old)]
    if calls:
        message["tool_calls"] = [plain_call(call) for call in calls]
    if given.get("tool_call_id") is not None:
        message["tool_call_id"] = given["tool_call_id"]
    thoughts = [given[name] for name in reversed(THOUGHTS) if given.get(name) is not None]
    return message | (dict.fromkeys(THOUGHTS, thoughts[0]) if thoughts else {})


def plain_text(content: Any) -> str:
    """Content, of which text parts are one text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [{"text": part} if isinstance(part, str) else part for part in content]
    for part in parts:
        if part.get("type") not in (None, "text") or not isinstance(part.get("text"), str):
            raise ValueError(
                f"it holds a part of type {part.get('type')!r}, and only text is served"
            )
    return "".join(part["text"] for part in parts)


def plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    known = {} if call.get("id") is None else {"id": call["id"]}
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        arguments = decoded(arguments)
    return known | {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def decoded(arguments: str | None) -> dict[str, Any] | str | None:
    """Arguments as templates take them, an object. A text that is none (a call that was cut off, a
    number beyond floats) stays as it is."""
    try:
        parsed = json.loads(arguments or "{}", parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _finite(written: str) -> float:
    if not math.isfinite(number := float(written)):
        raise ValueError(f"{written} is no number of JSON")
    return number


def plain_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = tool.get("function") or tool
    function: dict[str, Any] = {"name": given["name"]}
    if given.get("description") is not None:
        function["description"] = given["description"]
    function["parameters"] = given.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def conversation_of(row: Mapping[str, Any], where: str) -> Conversation:
    """`messages` of a row, or of a request, with its `tools` and `chat_template_kwargs`.

    Raises:
        UserError: it is no conversation; `where` names the row.
    """
    variables = dict(row.get("chat_template_kwargs") or {})
    if wrong := sorted(variables.keys() & set(RESERVED_VARIABLES)):
        raise UserError(f"{where}: {wrong[0]!r} is no variable of a chat template; leave it out")
    try:
        return Conversation(
            [plain_message(message) for message in row["messages"]],
            [plain_tool(tool) for tool in row.get("tools") or ()],
            variables,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"{where} is no conversation that is served ({reason}); mend its messages or tools"
        ) from error


def without_nulls(value: Any) -> Any:
    """Value without the keys that a table's other rows have."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value
