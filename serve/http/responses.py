"""OpenAI response bodies from engine requests. Plain dicts: they are built once per round, and
nothing validates them again."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from draftsmith.serve.http.protocol import Generation, StreamOptions
from draftsmith.serve.http.streams import Level, encoded, sent_event, speculation_report
from draftsmith.serve.http.tokens import TokenPrompt, TokenTexts
from draftsmith.serve.requests.request import FinishReason, Request, TokenLogprob, Update
from draftsmith.text_stream import ShowsTokens, TextStream

Body = dict[str, Any]
LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM gives a token without mass the same number


@dataclass
class Responder(ABC):
    """Builder of the bodies of one answer: its identity, usage, the optional report, and the frames
    of a stream."""

    model: str
    vocabulary: PreTrainedTokenizerBase
    asked: Generation
    prompts: Sequence[TokenPrompt]
    level: Level = "none"  # of the report of drafted and accepted tokens
    prefix: ClassVar[str]
    last_frame: ClassVar[str] = "data: [DONE]\n\n"

    def __post_init__(self) -> None:
        self.id, self.created = f"{self.prefix}{uuid.uuid4().hex}", int(time.time())
        self.num_choices = self.asked.n or 1  # of each prompt
        if self.asked.speculation.report:
            self.level = "detailed"

    def metrics(self, requests: Sequence[Request]) -> Body:
        if self.level == "none":
            return {}
        reports = [
            speculation_report(each.speculation, each.k, level=self.level) for each in requests
        ]
        if len(reports) == 1:
            return {"metrics": {"speculative_decoding": reports[0]}}
        # As vLLM: one report belongs to one choice, and several choices have none. A request with
        # `speculation.report` gets all.
        return {
            "metrics": {"speculative_decoding": None}
            | ({"choices": reports} if self.asked.speculation.report else {})
        }

    def frames(self, index: int, request: Request, update: Update) -> str:
        """Events of one round, as part of a stream."""
        return "".join(map(self.frame, self.events(index, request, update)))

    def frame(self, body: Body) -> str:
        """A body as part of a stream."""
        return sent_event(body)

    def failed(self, error: Body) -> Body:
        """Last body of a stream that ends with an error; `error` is OpenAI's object."""
        return error

    @abstractmethod
    def body(self, requests: Sequence[Request]) -> Body:
        """The whole answer of requests that have finished."""

    @abstractmethod
    def openings(self, num_requests: int) -> list[Body]:
        """Bodies with which a stream begins."""

    @abstractmethod
    def events(self, index: int, request: Request, update: Update) -> list[Body]:
        """Bodies of one round of a stream."""

    @abstractmethod
    def closings(self, requests: Sequence[Request]) -> list[Body]:
        """Bodies with which a stream ends."""


@dataclass
class ChoicesResponder(Responder):
    """Answers that are choices; those of one prompt are neighbours."""

    whole: ClassVar[str]  # names of the bodies
    piece: ClassVar[str]
    counts: dict[int, int] = field(default_factory=dict)  # tokens streamed, by choice
    # of chunks, before and behind their text, by choice
    around_text: dict[int, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.texts = TokenTexts(self.vocabulary)
        stream = self.asked.stream_options or StreamOptions()
        self.shows_usage, self.runs_usage = stream.include_usage, stream.continuous_usage_stats
        self.prompt_only = self.asked.most_tokens() == 0  # nothing else is part of the text

    def head(self, kind: str) -> Body:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def body(self, requests: Sequence[Request]) -> Body:
        choices = [
            self.choice(index, request) | self.tokens(request.output)
            for index, request in enumerate(requests)
        ]
        body = {**self.head(self.whole), "choices": choices, "usage": self.usage(requests)}
        return body | self.metrics(requests)

    def usage(self, requests: Sequence[Request]) -> Body:
        """Usage of all choices; prompt tokens count once per prompt, however many
        choices it has."""
        return self._usage(
            requests[:: self.num_choices], sum(request.num_output for request in requests)
        )

    def _usage(self, prompts: Sequence[Request], completion: int) -> Body:
        """Usage; `prompts` has one request of each prompt."""
        prompt = sum(request.num_prompt for request in prompts)
        completion = 0 if self.prompt_only else completion
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(request.num_cached for request in prompts)
            },
        }

    def tokens(self, tokens: list[int]) -> Body:
        if not self.asked.return_token_ids:
            return {}
        return {"token_ids": [] if self.prompt_only else tokens}

    def chunk(self, choices: list[Body]) -> Body:
        return {**self.head(self.piece), "choices": choices} | (
            {"usage": None} if self.shows_usage else {}
        )

    def events(self, index: int, request: Request, update: Update) -> list[Body]:
        body = self.chunk([self.delta(index, request, update) | self.tokens(update.tokens)])
        if self.runs_usage:
            # Of what was sent: the engine may be some rounds ahead.
            self.counts[index] = self.counts.get(index, 0) + len(update.tokens)
            body["usage"] = self._usage([request], self.counts[index])
        return [body]

    def openings(self, num_requests: int) -> list[Body]:
        return []

    def closings(self, requests: Sequence[Request]) -> list[Body]:
        """The chunk without choices, if the client asked for what it holds."""
        if not self.shows_usage and not self.asked.speculation.report:
            return []
        usage = {"usage": self.usage(requests)} if self.shows_usage else {}
        return [self.chunk([]) | usage | self.metrics(requests)]

    def prompt_logprobs(self, request: Request) -> Body:
        """Logprobs of the prompt in vLLM's layout, by token id. The first token has none."""
        count = self.asked.prompt_logprobs
        if count is None:
            return {}
        entries = [self._ranked(entry, count) for entry in request.prompt_logprobs]
        return {"prompt_logprobs": [None, *entries]}

    def _ranked(self, entry: TokenLogprob, count: int) -> Body:
        own = [(entry.token, entry.logprob, entry.rank)]
        likeliest = [
            (token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:count], 1)
        ]
        return {
            str(token): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self.texts.text(token),
            }
            for token, logprob, rank in own + likeliest
        }

    def token(self, token: int) -> str:
        by_id = self.asked.return_tokens_as_token_ids
        return f"token_id:{token}" if by_id else self.texts.text(token)

    def brings_text(self, request: Request, update: Update) -> bool:
        """True where the chunk of a round, unless a choice's first, has nothing of its own but
        text."""
        return (
            update.finish_reason is None
            and request.params.logprobs is None
            and not self.asked.return_token_ids
            and not self.runs_usage
        )

    def text_frame(self, index: int, text: str, choice: Callable[[int, str], Body]) -> str:
        """A chunk that brings text. What is around it is encoded once for each choice.

        Args:
            choice: choice of the chunk with this index and text.
        """
        around = self.around_text.get(index)
        if around is None:
            mark = uuid.uuid4().hex
            before, after = self.frame(self.chunk([choice(index, mark)])).split(f'"{mark}"')
            around = self.around_text[index] = (before, after)
        return encoded(text).join(around)

    def choice(self, index: int, request: Request) -> Body:
        """The whole answer `index` of a request that has finished: its only chunk's part."""
        whole = Update(request.output, request.text, request.logprobs, request.finish_reason)
        return self.delta(index, request, whole)

    @abstractmethod
    def delta(self, index: int, request: Request, update: Update) -> Body:
        """Part of a chunk that continues answer `index`."""


class Offsets:
    """Places where tokens begin in a text behind `begin` characters. Parts of a character begin
    where it does."""

    def __init__(self, stream: TextStream, begin: int = 0):
        self._stream, self._end = stream, begin

    def push(self, tokens: Sequence[int]) -> list[int]:
        found = []
        for token in tokens:
            found.append(self._end)
            self._end += len(self._stream.push([token]).text)
        return found


@dataclass
class CompletionResponder(ChoicesResponder):
    prefix = "cmpl-"
    whole = piece = "text_completion"
    begun: set[int] = field(default_factory=set)  # choices
    offsets: dict[int, Offsets] = field(default_factory=dict)  # of their tokens, by choice

    def delta(self, index: int, request: Request, update: Update) -> Body:
        prompt, first = self.prompts[index // self.num_choices], index not in self.begun
        self.begun.add(index)
        echoing = first and self.asked.echoes()
        text, entries = ("", []) if self.prompt_only else (update.text, update.logprobs)
        echoed = ""
        if echoing:
            echoed = self.vocabulary.decode(prompt.tokens) if prompt.text is None else prompt.text
        logprobs, count = None, request.params.logprobs
        if count is not None:
            if first:
                stream = self._stream(prompt.tokens, hides=request.params.skip_special_tokens)
                self.offsets[index] = Offsets(stream, len(echoed))
            offsets = self.offsets[index].push([entry.token for entry in entries])
            known = list[TokenLogprob | None](entries)
            if echoing:
                stream = self._stream((), hides=prompt.text is not None)
                offsets = Offsets(stream).push(prompt.tokens) + offsets
                known = [None, *request.prompt_logprobs, *entries]
            logprobs = self._logprobs(prompt.tokens[0], known, offsets, count)
        body = _text_choice(index, echoed + text, logprobs, update.finish_reason)
        body |= {"prompt_token_ids": prompt.tokens} if first and self.asked.return_token_ids else {}
        return body | (self.prompt_logprobs(request) if first else {})

    def frames(self, index: int, request: Request, update: Update) -> str:
        first = index not in self.begun
        if first or self.prompt_only or not self.brings_text(request, update):
            return super().frames(index, request, update)
        return self.text_frame(index, update.text, _text_choice)

    def _stream(self, context: Sequence[int], *, hides: bool) -> TextStream:
        """Text without special tokens, or with them."""
        shown = self.vocabulary if hides else ShowsTokens(self.vocabulary, ())
        return TextStream(shown, context=context)

    def _logprobs(
        self, first: int, entries: Sequence[TokenLogprob | None], offsets: list[int], count: int
    ) -> Body:
        """Logprobs in the layout of completions. Only the first token of a prompt has no entry:
        nothing comes before it."""
        tokens, values, tops = [], [], []
        for entry in entries:
            tokens.append(self.token(first if entry is None else entry.token))
            values.append(None if entry is None else finite(entry.logprob))
            tops.append(None if entry is None else self._top(entry, count))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob, count: int) -> Body:
        # Of tokens with the same text the likeliest is kept, and the emitted one before all.
        return {
            self.token(token): finite(value)
            for token, value in [*entry.top[:count][::-1], (entry.token, entry.logprob)]
        }


def _text_choice(
    index: int, text: str, logprobs: Body | None = None, reason: FinishReason | None = None
) -> Body:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_name(reason),
    }


def finish_name(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
