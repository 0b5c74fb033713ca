"""Text that a chat template makes of a conversation."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from draftsmith.chats.messages import Message
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
