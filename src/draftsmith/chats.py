"""Messages and tools as chat templates take them, from requests and from rows of files, and the
text that a template makes of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from draftsmith.errors import UserError

DEVELOPER, SYSTEM = "developer", "system"
PROBE = "qwertzuiop"  # content of a made-up message


class ChatTokenizer(Hashable, Protocol):
    """Part of a transformers tokenizer that chats need."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def rendered(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    *,
    tools: Sequence[dict[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: dict[str, Any] | None = None,
    where: str = "messages",
) -> str:
    """Text of plain messages; `variables` are the chat template's own.

    Raises:
        UserError: the template refuses them; `where` names them.
    """
    source = source_of(tokenizer.chat_template)
    if DEVELOPER not in source:
        # A template without OpenAI's newer name of the role.
        messages = [
            message | {"role": SYSTEM} if message["role"] == DEVELOPER else message
            for message in messages
        ]
    if reads_parts(tokenizer, source):
        messages = [_in_parts(message) for message in messages]
    options: dict[str, Any] = {
        "tools": list(tools) or None,
        "tokenize": False,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        **(variables or {}),
    }
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:
        # Templates are programs and may raise any exception, mostly about the order of roles.
        if any("tool_calls" in message for message in messages):
            # Some add arguments to texts, so that objects fail.
            with contextlib.suppress(Exception):
                return tokenizer.apply_chat_template(_with_text_arguments(messages), **options)
        reason = re.sub(r"\s+", " ", str(error)) or type(error).__name__
        raise UserError(
            f"{where} are refused by the chat template ({reason}); mend them"
        ) from error


@functools.lru_cache(maxsize=8)
def reads_parts(tokenizer: ChatTokenizer, source: str) -> bool:
    """True of a template that leaves out content which is a text, and not one that is a list of
    parts."""

    def shows(content: Any) -> bool:
        with contextlib.suppress(Exception):
            asked = [{"role": "user", "content": content}]
            return PROBE in tokenizer.apply_chat_template(asked, tokenize=False)
        return False

    return "content" in source and not shows(PROBE) and shows([{"type": "text", "text": PROBE}])


def _in_parts(message: Message) -> Message:
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def _with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    found = copy.deepcopy(list(messages))
    for message in found:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return found


def source_of(template: Any) -> str:
    """Text of a template; of several by name all of them."""
    if isinstance(template, dict):
        return "\n".join(template.values())
    return template or ""


def template_takes(source: str, variable: str) -> bool:
    """True when the text of a chat template depends on the variable."""
    # "%}" and "}}" end a statement; a lone "}" is of a dictionary in it.
    statements = re.findall(r"\{[{%].*?[}%]\}", source, re.DOTALL)
    word = re.compile(rf"\b{variable}\b")
    return any(word.search(statement) for statement in statements)


Message = dict[str, Any]
# A template reads one of them.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
ARGUMENTS = ("arguments", "parameters")  # of a call
# Of a tool: OpenAI's name, Anthropic's, and that of tool servers.
PARAMETERS = ("parameters", "input_schema", "inputSchema")
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
    if not isinstance(content, list):
        raise ValueError(f"it holds {content!r:.40} as its content, which is no text")
    parts = [{"text": part} if isinstance(part, str) else part for part in content]
    for part in parts:
        if part.get("type") not in (None, "text") or not isinstance(part.get("text"), str):
            raise ValueError(f"it holds a part of type {part.get('type')!r}; only text is served")
    return "".join(part["text"] for part in parts)


def plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    known = {} if call.get("id") is None else {"id": call["id"]}
    arguments = next((function[one] for one in ARGUMENTS if function.get(one) is not None), None)
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
    schema = next((given[name] for name in PARAMETERS if given.get(name)), None)
    if isinstance(schema, str):  # as Parquet holds objects of several kinds
        schema = decoded(schema)
    if not isinstance(schema, Mapping | None):
        raise ValueError(f"tool {given['name']!r} has parameters that are no object")
    function["parameters"] = schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def request_variables(fields: Mapping[str, Any], source: str, where: str = "") -> dict[str, Any]:
    """Variables of the chat template whose text is `source`: those given as such, and fields of a
    request that it takes.

    Raises:
        UserError: it does not take a field.
    """
    variables = dict(fields.get("chat_template_kwargs") or {})
    effort, verbosity = fields.get("reasoning_effort"), fields.get("verbosity")
    if effort is not None:
        if template_takes(source, "reasoning_effort"):
            variables.setdefault("reasoning_effort", effort)
        elif effort == "none" and template_takes(source, "enable_thinking"):
            variables.setdefault("enable_thinking", False)
        else:
            raise UserError(
                f"{where}reasoning_effort is {effort!r}, which this model's chat template does not "
                "take; leave it out or set its variables by chat_template_kwargs"
            )
    if verbosity not in (None, "medium"):
        if not template_takes(source, "verbosity"):
            raise UserError(
                f"{where}verbosity is {verbosity!r}, which this model's chat template does not "
                "take; leave it out"
            )
        variables.setdefault("verbosity", verbosity)
    return variables


def conversation_of(row: Mapping[str, Any], where: str, source: str = "") -> Conversation:
    """`messages` of a row, or of a request, with the tools that it shows the model and the
    variables of the chat template whose text is `source`.

    Raises:
        UserError: it is no conversation; `where` names the row.
    """
    variables = request_variables(row, source, f"{where}: ")
    if wrong := sorted(variables.keys() & set(RESERVED_VARIABLES)):
        raise UserError(f"{where}: {wrong[0]!r} is no variable of a chat template; leave it out")
    tools = None if row.get("tool_choice") == "none" else row.get("tools")
    try:
        return Conversation(
            [plain_message(message) for message in row["messages"]],
            [plain_tool(tool) for tool in tools or ()],
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
