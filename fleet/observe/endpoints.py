"""Generating endpoints whose traffic is read: the prompt of a request, and an answer from its
bytes, one JSON object or the server-sent events of a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftsmith.chat_answers import AnswerTokenizer
from draftsmith.chats import conversation_of, rendered, source_of

Body = Mapping[str, Any]
BETWEEN = re.compile(rb"\r?\n\r?\n")
ENDS = re.compile(rb"\r\n|\r|\n")
DONE = b"[DONE]"


class Completions:
    path = "/v1/completions"

    def prompt(self, body: Body, tokenizer: AnswerTokenizer) -> list[int] | None:
        """Tokens of a single prompt by this tokenizer; None where there is no such prompt."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if not isinstance(prompt, str):
            return None
        special = body.get("add_special_tokens", True)
        return tokenizer.encode(prompt, add_special_tokens=bool(special))

    def given_prompt(self, body: Body) -> list[int] | None:
        """Tokens of a prompt that was sent as ids."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
            prompt = prompt[0]
        if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
            return prompt
        return None

    def text(self, choice: Body) -> str | None:
        """Text of a choice or of its piece; None where it is not all that was generated."""
        return choice.get("text") or ""


class Chat(Completions):
    path = "/v1/chat/completions"

    def prompt(self, body: Body, tokenizer: AnswerTokenizer) -> list[int] | None:
        chat = conversation_of(body, "a request", source_of(tokenizer.chat_template))
        continued = bool(body.get("continue_final_message"))
        prompted = body.get("add_generation_prompt")
        text = rendered(
            chat.messages,
            tokenizer,
            tools=chat.tools,
            add_generation_prompt=not continued if prompted is None else prompted,
            continue_final_message=continued,
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


ENDPOINTS = {one.path: one for one in (Completions(), Chat())}


@dataclass
class ObservedAnswer:
    """Contents of an answer with one choice; parts that the server does not give stay empty."""

    id: str = ""
    model: str = ""
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    text: str = ""
    is_text_whole: bool = True  # `text` is all that was generated, special tokens excepted
    finish: str | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    report: Mapping[str, Any] = field(default_factory=dict)  # of drafted and accepted tokens
    drafted: int = 0  # in all, where the report has no steps
    accepted: int = 0
    num_choices: int = 0

    def add(self, endpoint: Completions, body: Mapping[str, Any]) -> None:
        """Adds a whole answer or a piece of a stream. Raises `KeyError`, `TypeError` or
        `ValueError` on another form."""
        self.id = self.id or str(body.get("id") or "")
        self.model = self.model or str(body.get("model") or "")
        self._add_counts(body)
        for choice in body.get("choices") or ():
            self.num_choices = max(self.num_choices, int(choice.get("index", 0)) + 1)
            text = endpoint.text(choice)
            self.is_text_whole &= text is not None
            self.text += text or ""
            self.finish = choice.get("finish_reason") or self.finish
            self.stop_reason = choice.get("stop_reason") or self.stop_reason
            prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
            self.prompt_ids = self.prompt_ids or prompt
            if choice.get("token_ids") is not None:
                self.token_ids = [*(self.token_ids or ()), *choice["token_ids"]]

    def _add_counts(self, body: Mapping[str, Any]) -> None:
        usage = body.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.completion_tokens = usage.get("completion_tokens", self.completion_tokens)
        report = (body.get("metrics") or {}).get("speculative_decoding")
        self.report = report or self.report
        # llama-server
        timings = body.get("timings") or {}
        drafted, accepted = "num_draft_tokens", "num_accepted_draft_tokens"
        self.drafted = timings.get("draft_n") or self.report.get(drafted) or self.drafted
        self.accepted = (
            timings.get("draft_n_accepted") or self.report.get(accepted) or self.accepted
        )


def read_answer(endpoint: Completions, data: bytes, *, is_stream: bool) -> ObservedAnswer:
    """Raises `ValueError` where it is no whole answer."""
    answer = ObservedAnswer()
    try:
        for body in events(data) if is_stream else [json.loads(data)]:
            answer.add(endpoint, body)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an answer of {endpoint.path} ({error!r})") from error
    if answer.finish is None:
        raise ValueError("the answer has no end")
    return answer


def events(data: bytes) -> Iterator[dict[str, Any]]:
    """Bodies of server-sent events; comments and the closing mark are left out."""
    for event in BETWEEN.split(data):
        lines = [line[5:].strip() for line in ENDS.split(event) if line.startswith(b"data:")]
        payload = b"\n".join(lines)
        if payload and payload != DONE:
            yield json.loads(payload)
