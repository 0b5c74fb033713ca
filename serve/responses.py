"""OpenAI response bodies from engine requests. Plain dicts: they are built once a round, and nothing validates them again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from draftsmith.serve.request import FinishReason, Request, SpeculationStats, TokenLogprob, Update

Body = dict[str, Any]


class Vocabulary(Protocol):
    def decode(self, token_ids: list[int]) -> str: ...


def usage(requests: Sequence[Request], num_prompts: int) -> Body:
    """Prompt tokens count once a prompt, however many choices it has."""
    choices = len(requests) // num_prompts
    prompt = sum(request.num_prompt for request in requests[::choices])
    completion = sum(request.num_output for request in requests)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def speculation_report(stats: SpeculationStats, k: int) -> Body:
    """vLLM's per-request fields, with `tau` (of the rounds that drafted) and all target passes added."""
    drafts, offered, accepted = len(stats.offered), sum(stats.offered), sum(stats.accepted)
    deepest = max([k, *stats.offered])
    histogram = [stats.accepted.count(count) for count in range(deepest + 1)]
    return {
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "draft_acceptance_rate": accepted / offered if offered else None,
        "acceptance_histogram": histogram,
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": offered,
        "num_spec_tokens": k,
        "per_step_accepted": stats.accepted,
        "per_step_drafted": stats.offered,
        "per_step_committed": stats.committed,
        "num_target_passes": stats.num_passes,
        "num_committed_tokens": stats.num_committed,
        "tau": sum(stats.committed) / drafts if drafts else None,
    }


def finish_name(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


class Extras(NamedTuple):
    """What a request asked for beyond OpenAI's fields."""

    report: bool = False  # what became of the drafts
    token_ids: bool = False  # each choice also carries its tokens
    name_by_id: bool = False  # tokens of logprobs are named "token_id:17", which text cannot confuse


@dataclass
class Responder:
    """Shared by both endpoints: identity of the response, usage, the optional report."""

    model: str
    vocabulary: Vocabulary
    extras: Extras
    prefix: str = "cmpl"
    whole: str = "text_completion"
    piece: str = "text_completion"
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: dict[int, int] = field(default_factory=dict)  # characters streamed, by choice

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def head(self, kind: str) -> Body:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def body(self, requests: Sequence[Request], num_prompts: int) -> Body:
        choices = [self.choice(index, request) | self.tokens(request.output) for index, request in enumerate(requests)]
        body = {**self.head(self.whole), "choices": choices, "usage": usage(requests, num_prompts)}
        return body | self.metrics(requests)

    def metrics(self, requests: Sequence[Request]) -> Body:
        if not self.extras.report:
            return {}
        # As vLLM: one report belongs to one choice, and several choices have none.
        single = requests[0] if len(requests) == 1 else None
        return {"metrics": {"speculative_decoding": single and speculation_report(single.speculation, single.k)}}

    def tokens(self, tokens: list[int]) -> Body:
        return {"token_ids": tokens} if self.extras.token_ids else {}

    def chunk(self, choices: list[Body]) -> Body:
        return {**self.head(self.piece), "choices": choices}

    def update(self, index: int, request: Request, update: Update) -> Body:
        """The chunk of one round."""
        return self.chunk([self.delta(index, request, update) | self.tokens(update.tokens)])

    def closing(self, requests: Sequence[Request], num_prompts: int, *, with_usage: bool) -> Body | None:
        """The chunk without choices that ends a stream, if the client asked for what it holds."""
        if not with_usage and not self.extras.report:
            return None
        return self.chunk([]) | ({"usage": usage(requests, num_prompts)} if with_usage else {}) | self.metrics(requests)

    def token(self, token: int) -> str:
        return f"token_id:{token}" if self.extras.name_by_id else self.vocabulary.decode([token])

    def choice(self, index: int, request: Request) -> Body:
        raise NotImplementedError

    def opening(self, index: int) -> Body | None:
        """A chunk sent before the first token."""
        return None

    def delta(self, index: int, request: Request, update: Update) -> Body:
        raise NotImplementedError


class CompletionResponder(Responder):
    def choice(self, index: int, request: Request) -> Body:
        return {
            "index": index,
            "text": request.text,
            "logprobs": self._logprobs(request, request.logprobs, 0),
            "finish_reason": finish_name(request.finish_reason),
        }

    def delta(self, index: int, request: Request, update: Update) -> Body:
        offset = self.offsets.get(index, 0)
        self.offsets[index] = offset + len(update.text)
        return {
            "index": index,
            "text": update.text,
            "logprobs": self._logprobs(request, update.logprobs, offset),
            "finish_reason": finish_name(update.finish_reason),
        }

    def _logprobs(self, request: Request, entries: list[TokenLogprob], offset: int) -> Body | None:
        if request.params.logprobs is None:
            return None
        tokens, offsets, tops = [], [], []
        for entry in entries:
            text = self.token(entry.token)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
            tops.append({self.token(token): value for token, value in [*entry.top[::-1], (entry.token, entry.logprob)]})
        values = [entry.logprob for entry in entries]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


class ChatResponder(Responder):
    def choice(self, index: int, request: Request) -> Body:
        return {
            "index": index,
            "message": {"role": "assistant", "content": request.text},
            "logprobs": self._logprobs(request, request.logprobs),
            "finish_reason": finish_name(request.finish_reason),
        }

    def opening(self, index: int) -> Body:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, request: Request, update: Update) -> Body:
        return {
            "index": index,
            "delta": {"content": update.text} if update.text else {},
            "logprobs": self._logprobs(request, update.logprobs),
            "finish_reason": finish_name(update.finish_reason),
        }

    def _logprobs(self, request: Request, entries: list[TokenLogprob]) -> Body | None:
        if request.params.logprobs is None:
            return None
        content = [
            self._entry(entry.token, entry.logprob) | {"top_logprobs": [self._entry(*pair) for pair in entry.top]}
            for entry in entries
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> Body:
        text = self.token(token)
        # A part of a character has no text of its own, and its bytes are not those of the replacement character.
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": data}


def completion_responder(model: str, vocabulary: Vocabulary, extras: Extras) -> Responder:
    return CompletionResponder(model, vocabulary, extras)


def chat_responder(model: str, vocabulary: Vocabulary, extras: Extras) -> Responder:
    return ChatResponder(model, vocabulary, extras, prefix="chatcmpl", whole="chat.completion", piece="chat.completion.chunk")


def error_body(message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> Body:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
