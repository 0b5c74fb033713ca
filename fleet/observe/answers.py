"""A server's answer read from its bytes: one JSON object, or the server-sent events of a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from draftsmith.fleet.observe.endpoints import Endpoint, Entry

BETWEEN = re.compile(rb"\r?\n\r?\n")
ENDS = re.compile(rb"\r\n|\r|\n")
DONE = b"[DONE]"


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
    entries: list[Entry] = field(default_factory=list)
    num_choices: int = 0

    def add(self, endpoint: Endpoint, body: Mapping[str, Any]) -> None:
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
            self._add_tokens(endpoint, body, choice)

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

    def _add_tokens(
        self, endpoint: Endpoint, body: Mapping[str, Any], choice: Mapping[str, Any]
    ) -> None:
        prompt = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
        self.prompt_ids = self.prompt_ids or prompt
        if choice.get("token_ids") is not None:
            self.token_ids = [*(self.token_ids or ()), *choice["token_ids"]]
        if logprobs := choice.get("logprobs"):
            # The client's own have tokens by their texts.
            with suppress(KeyError, TypeError, ValueError):
                self.entries += endpoint.entries(logprobs)


def read_answer(endpoint: Endpoint, data: bytes, *, is_stream: bool) -> ObservedAnswer:
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
        payload = payload_of(event)
        if payload and payload != DONE:
            yield json.loads(payload)


def payload_of(event: bytes) -> bytes:
    lines = [line[5:].strip() for line in ENDS.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines)
