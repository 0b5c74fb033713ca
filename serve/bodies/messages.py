"""Messages of a conversation, as OpenAI has them and as chat templates take them."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from draftsmith.serve.bodies.formats import JsonObject, StrictModel, Text, writable


class TextPart(StrictModel):
    type: Literal["text"]
    text: Text


class CalledFunction(StrictModel):
    name: Text
    arguments: Text | None = None

    @field_validator("arguments")
    @classmethod
    def _decode_to_text(cls, value: str | None) -> str | None:
        decoded(value)
        return value

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": decoded(self.arguments)}


def decoded(arguments: str | None) -> dict[str, Any] | str | None:
    """Arguments as templates take them, an object. A text that is none (a call that was cut off, a
    number beyond floats) stays as it is."""
    try:
        parsed = json.loads(arguments or "{}", parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return arguments
    return writable(parsed) if isinstance(parsed, dict) else arguments


def _finite(written: str) -> float:
    if not math.isfinite(number := float(written)):
        raise ValueError(f"{written} is no number of JSON")
    return number


class MadeCall(StrictModel):
    """A tool call of an earlier answer."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of streamed calls that a client sends back

    def plain(self) -> dict[str, Any]:
        known = {} if self.id is None else {"id": self.id}
        return known | {"type": self.type, "function": self.function.plain()}


class Message(StrictModel):
    role: Text
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    tool_calls: list[MadeCall] | None = None  # of an assistant
    tool_call_id: Text | None = None  # of a tool
    reasoning_content: Text | None = None  # of an assistant
    reasoning: Text | None = None  # vLLM's name of it
    # of an assistant, where a client sends an answer back as it came
    annotations: list[JsonObject] | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
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
        content = (
            "".join(part.text for part in self.content)
            if isinstance(self.content, list)
            else self.content or ""
        )
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        thoughts = self.reasoning_content if self.reasoning is None else self.reasoning
        if thoughts is not None:
            message |= {"reasoning_content": thoughts, "reasoning": thoughts}
        return message


# Parameters of apply_chat_template itself: a client must not set them through the variables of its
# template.
RESERVED_VARIABLES = (
    "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip


class Conversation(StrictModel):
    """Messages, and options of the chat template that makes a prompt of them."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None  # default: true unless the final message is continued
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _continues_or_prompts(self) -> Conversation:
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
