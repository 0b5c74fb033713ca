"""Prompts, from a file or from the standard library's text, and streaming requests against an
OpenAI-compatible server, in a closed or an open loop, timed at the client."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from draftsmith.client import Scrape, base_of, bearer, message_of, parse, remedy_of, send_async
from draftsmith.errors import UserError, first_line
from draftsmith.prompts.corpus import CORPORA, held_out
from draftsmith.prompts.shapes import Row
from draftsmith.prompts.suites import Question, rows_to_train

Body = dict[str, Any]
Prompt = dict[str, Any]  # {"prompt": text} or {"messages": [...]}
UNFIT = (400, 413, 422)  # one request's own fault, such as a prompt longer than the context


def read_prompts(source: str, *, count: int, chars: int, seed: int) -> list[Prompt]:
    """`count` prompts, in the order of a file (repeated if it is short) or drawn from a built-in
    corpus's held-out part."""
    if count < 1:
        raise UserError(f"num_prompts is {count}; it must be at least 1")
    prompts = _cut(source, count, chars, seed) if source in CORPORA else _read(source, count)
    return [prompts[index % len(prompts)] for index in range(count)]


def _cut(source: str, count: int, chars: int, seed: int) -> list[Prompt]:
    documents = [
        document
        for document in CORPORA[source]()
        if held_out(document) and len(document.text) > 2 * chars
    ]
    generator = random.Random(seed)
    prompts = []
    for _ in range(count):
        text = generator.choice(documents).text
        begin = generator.randrange(len(text) - 2 * chars + 1)
        line = text.find("\n", begin) + 1  # start at a line of its own
        prompts.append({"prompt": text[line : line + chars]})
    return prompts


def _read(source: str, count: int) -> list[Prompt]:
    """The first `count` questions of a file or folder."""
    rows = (_question(row, where) for where, row in rows_to_train(source))
    prompts = list(itertools.islice(filter(None, rows), count))
    if not prompts:
        raise UserError(f"prompts {source!r} hold no question; give at least one")
    return prompts


def _question(row: Row, where: str) -> Prompt | None:
    """Question of a row: of a conversation that ends in an answer, its first question."""
    if "messages" not in row:
        if "prompt" not in row:
            raise UserError(f"{where} holds a text and neither `prompt` nor `messages`; add one")
        return {"prompt": row["prompt"]} if row["prompt"].strip() else None
    turns = row["messages"]
    if turns[-1]["role"] != "assistant":
        return row
    asked = list(itertools.takewhile(lambda turn: turn["role"] != "assistant", turns))
    if [turn["role"] for turn in asked] == ["user"] and row.keys() == {"messages"}:
        text = asked[0].get("content")
        if isinstance(text, str):
            return {"prompt": text} if text.strip() else None
    return {**row, "messages": asked} if asked else None


@dataclass
class TimedAnswer:
    num_tokens: int = 0
    text: str = ""
    begun_s: float = 0.0
    first_s: float = 0.0  # when the first chunk of the answer came
    last_s: float = 0.0
    report: Body | None = None  # metrics.speculative_decoding
    prompt: int = 0  # number of the prompt that it answers, or a turn of it
    task: str = ""  # of a suite's prompt
    refused: str = ""  # reason of a server that answers other requests

    @property
    def e2el_s(self) -> float:
        """Time from sending to the last token."""
        return self.last_s - self.begun_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.begun_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the tokens after the first; None for an answer of one token."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass
class PassResult:
    answers: list[TimedAnswer] = field(default_factory=list)
    wall_s: float = 0.0
    counted: list[Scrape] = field(default_factory=list)  # by the server meanwhile

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    def add(self, part: PassResult, first: int) -> None:
        """Adds answers to the prompts from number `first` on."""
        for answer in part.answers:
            answer.prompt += first
        self.answers += part.answers
        self.wall_s += part.wall_s
        self.counted += part.counted


class Client:
    def __init__(self, url: str, *, api_key: str | None, timeout_s: float):
        self.http = httpx.AsyncClient(
            base_url=base_of(url), headers=bearer(api_key), timeout=timeout_s
        )

    async def model(self) -> str:
        try:
            listed = (await self.http.get("/v1/models")).raise_for_status().json()
            return listed["data"][0]["id"]
        except (httpx.HTTPError, KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            said = f"does not answer /v1/models ({first_line(error)})"
            raise UserError(
                f"{self.http.base_url} {said}; check the URL, or give --model"
            ) from error

    async def measure(
        self, prompts: Sequence[Prompt | Question], body: Body, concurrency: int
    ) -> PassResult:
        """Send all prompts once, `concurrency` at a time."""
        result, asked = _opened(prompts)
        left = iter(asked)

        async def worker() -> None:
            for question, answers in left:
                await self._converse(question, body, answers)

        begun_s = perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        result.wall_s = perf_counter() - begun_s
        return result

    async def measure_open(
        self, prompts: Sequence[Prompt | Question], body: Body, gaps_s: Sequence[float]
    ) -> PassResult:
        """Send all prompts once, each `gaps_s` after the one before it, answered or not."""
        result, asked = _opened(prompts)
        begun_s = perf_counter()
        due_s, sent = begun_s, []
        for (question, answers), gap_s in zip(asked, gaps_s, strict=True):
            due_s += gap_s
            await asyncio.sleep(max(0.0, due_s - perf_counter()))
            sent.append(asyncio.create_task(self._converse(question, body, answers)))
        await asyncio.gather(*sent)
        result.wall_s = perf_counter() - begun_s
        return result

    async def scrape(self) -> Scrape:
        """The server's metrics; empty where it has none. llama.cpp's then hangs up."""
        try:
            return parse((await self.http.get("/metrics")).text)
        except (UserError, httpx.HTTPError):
            return Scrape({}, {})

    def _send(self, request: httpx.Request) -> Awaitable[httpx.Response]:
        return self.http.send(request, stream=True)

    async def _converse(
        self, question: Question, body: Body, answers: Sequence[TimedAnswer]
    ) -> None:
        """Ask every turn, each behind the answers before it."""
        fields = dict(question.fields)
        for number, answer in enumerate(answers):
            if number:
                said = {"role": "assistant", "content": answers[number - 1].text}
                turns = [*fields["messages"], said, question.later[number - 1]]
                fields["messages"] = turns
            await self._ask(fields, body, answer)
            if answer.refused:
                for later in answers[number + 1 :]:
                    later.refused = answer.refused
                return

    async def _ask(self, prompt: Prompt, body: Body, answer: TimedAnswer) -> None:
        path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
        whole = {**body, **prompt, "stream": True, "stream_options": {"include_usage": True}}
        answer.begun_s = perf_counter()
        request = self.http.build_request("POST", path, json=whole)
        try:
            async with aclosing(await send_async(self._send, request)) as response:
                if response.status_code in UNFIT:
                    answer.refused = message_of(await response.aread())
                    return
                if response.status_code != 200:
                    raise UserError(
                        f"the server refused a request: {message_of(await response.aread())}"
                    )
                async for line in _lines(response):
                    if line.startswith("data: ") and line != "data: [DONE]":
                        _take(_event(line[6:]), answer)
        except httpx.HTTPError as error:
            raise UserError(f"a request failed ({error!r}); {remedy_of(error)}") from error


def _opened(
    prompts: Sequence[Prompt | Question],
) -> tuple[PassResult, list[tuple[Question, list[TimedAnswer]]]]:
    """A pass before it is asked: an answer for every turn of each prompt, in their order."""
    asked = []
    for number, prompt in enumerate(prompts):
        question = prompt if isinstance(prompt, Question) else Question(prompt)
        turns = range(1 + len(question.later))
        asked.append((question, [TimedAnswer(prompt=number, task=question.task) for _ in turns]))
    return PassResult([answer for _, answers in asked for answer in answers]), asked


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines of server-sent events. httpx's own also end at U+2028 and its like, which stand within
    a text."""
    pending = ""
    async for text in response.aiter_text():
        *lines, pending = (pending + text).split("\n")
        for line in lines:
            yield line.removesuffix("\r")


def _event(text: str) -> Body:
    """Parsed event. A server that fails in the middle of an answer reports it as an event.

    Raises:
        UserError: the event is an error."""
    event = json.loads(text)
    if "error" in event:
        raise UserError(f"the server broke an answer off: {message_of(text.encode())}")
    return event


def _take(chunk: Body, answer: TimedAnswer) -> None:
    for choice in chunk["choices"]:
        delta = choice.get("delta", {})
        if "role" in delta and not delta.get("content"):
            continue  # opens a chat answer before any token
        now_s = perf_counter()
        if answer.first_s == 0.0:
            answer.first_s = now_s
        answer.last_s = now_s
        answer.text += choice.get("text") or delta.get("content") or ""
    if chunk.get("usage"):
        answer.num_tokens = chunk["usage"]["completion_tokens"]
    if chunk.get("metrics"):
        answer.report = chunk["metrics"]["speculative_decoding"]
