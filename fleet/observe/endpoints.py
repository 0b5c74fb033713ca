"""Generating endpoints whose traffic is read: the prompt of a request, and the text and logprobs of
an answer's choice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from draftsmith.chats.answers import AnswerTokenizer
from draftsmith.chats.messages import conversation_of
from draftsmith.chats.template import rendered

Body = Mapping[str, Any]
# As vLLM and `draftsmith serve` name tokens under return_tokens_as_token_ids.
BY_ID = re.compile(r"token_id:(\d+)\Z")


class Entry(NamedTuple):
    """Logprobs at one token of an answer."""

    token: int
    logprob: float
    top: dict[int, float]  # logprobs by token


class Endpoint(Protocol):
    path: str

    def prompt(self, body: Body, tokenizer: AnswerTokenizer) -> list[int] | None:
        """Tokens of a single prompt by this tokenizer; None where there is no such prompt."""
        ...

    def given_prompt(self, body: Body) -> list[int] | None:
        """Tokens of a prompt that was sent as ids."""
        ...

    def text(self, choice: Body) -> str | None:
        """Text of a choice or of its piece; None where it is not all that was generated."""
        ...

    def entries(self, logprobs: Body) -> list[Entry]: ...

    def logprob_fields(self, top: int) -> dict[str, Any]:
        """Fields of a request for `top` logprobs a token."""
        ...


class Completions:
    path = "/v1/completions"

    def prompt(self, body: Body, tokenizer: AnswerTokenizer) -> list[int] | None:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if not isinstance(prompt, str):
            return None
        special = body.get("add_special_tokens", True)
        return tokenizer.encode(prompt, add_special_tokens=bool(special))

    def given_prompt(self, body: Body) -> list[int] | None:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
            prompt = prompt[0]
        if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
            return prompt
        return None

    def text(self, choice: Body) -> str | None:
        return choice.get("text") or ""

    def entries(self, logprobs: Body) -> list[Entry]:
        rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
        return [
            Entry(by_id(token), logprob, {by_id(one): value for one, value in (top or {}).items()})
            for token, logprob, top in rows
        ]

    def logprob_fields(self, top: int) -> dict[str, Any]:
        return {"logprobs": top}


class Chat:
    path = "/v1/chat/completions"

    def prompt(self, body: Body, tokenizer: AnswerTokenizer) -> list[int] | None:
        chat = conversation_of(body, "a request")
        text = rendered(
            chat.messages,
            tokenizer,
            tools=chat.tools,
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
            variables=chat.variables,
        )
        return tokenizer.encode(text, add_special_tokens=bool(body.get("add_special_tokens")))

    def given_prompt(self, body: Body) -> list[int] | None:
        return None

    def text(self, choice: Body) -> str | None:
        message = choice.get("message") or choice.get("delta") or {}
        # A parser took these out of the text, with the tokens around them.
        parsed = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal")
        if any(message.get(name) for name in parsed):
            return None
        return message.get("content") or ""

    def entries(self, logprobs: Body) -> list[Entry]:
        return [
            Entry(
                by_id(one["token"]),
                one["logprob"],
                {by_id(other["token"]): other["logprob"] for other in one["top_logprobs"]},
            )
            for one in logprobs["content"] or ()
        ]

    def logprob_fields(self, top: int) -> dict[str, Any]:
        return {"logprobs": True, "top_logprobs": top}


def by_id(token: str) -> int:
    """Raises `ValueError` for a token that is named by its text, which several tokens may share."""
    found = BY_ID.match(token)
    if found is None:
        raise ValueError(f"token {token!r} is not named by its id")
    return int(found[1])


ENDPOINTS: dict[str, Endpoint] = {one.path: one for one in (Completions(), Chat())}
