"""Messages of a conversation, as OpenAI has them and as chat templates take them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from draftsmith.chats.messages import RESERVED_VARIABLES, decoded, plain_message
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
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    tool_calls: list[MadeCall] | None = None  # of an assistant
    tool_call_id: Text | None = None  # of a tool
    reasoning_content: Text | None = None  # of an assistant
    reasoning: Text | None = None  # vLLM's name of it
    # of an assistant, where a client sends an answer back as it came
    annotations: list[JsonObject] | None = None

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

    messages: Annotated[list[MessageBody], Field(min_length=1)]
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
