"""Chunks of a stream: what is encoded once around a text gives the bytes of the whole body."""

from __future__ import annotations

import json

import pytest

from draftsmith.serve.http.chat import chat_responder
from draftsmith.serve.http.responses import (
    Responder,
    ResponseOptions,
    completion_responder,
)
from draftsmith.serve.http.tokens import Prompt
from draftsmith.serve.requests.request import FinishReason, Request, TokenLogprob, Update
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.tools.answer import AnswerForm
from draftsmith.serve.tools.reasoning import ReasoningFormat, Thinking

TEXTS = [" def", "", '"\\\n\t\0', "\u2028\x85\u00e9\U0001f600", "text", ""]
PROMPT = Prompt([1, 2], "p")


class Letters:
    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(97 + token) for token in token_ids)


def request(logprobs: int | None = None) -> Request:
    params = SamplingParams(logprobs=logprobs)
    return Request("r", [1, 2], 2, params, seed=0, k=0, max_tokens=99)


def updates(logprobs: int | None) -> list[Update]:
    entries = [] if logprobs is None else [TokenLogprob(3, -1.0, [(3, -1.0)])]
    ends = [None] * (len(TEXTS) - 1) + [FinishReason.LENGTH]
    return [Update([3], text, entries, end) for text, end in zip(TEXTS, ends, strict=True)]


def responder(kind: str, options: ResponseOptions) -> Responder:
    if kind == "completion":
        return completion_responder('a "model"', Letters(), options, [PROMPT], 2)
    form = AnswerForm()
    if kind == "chat that reasons":
        form = AnswerForm(reasoning=ReasoningFormat("<a>", "</a>"), thinking=Thinking.MAYBE)
    return chat_responder('a "model"', Letters(), options, PROMPT, 2, form)


@pytest.mark.parametrize("kind", ["completion", "chat", "chat that reasons"])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize(
    "options",
    [
        ResponseOptions(),
        ResponseOptions(usage=True),
        ResponseOptions(usage=True, running_usage=True),
        ResponseOptions(token_ids=True),
        ResponseOptions(lossless=False),
        ResponseOptions(echo=True),
        ResponseOptions(prompt_only=True),
    ],
    ids=repr,
)
def test_a_chunk_has_the_bytes_of_its_body(
    kind: str, logprobs: int | None, options: ResponseOptions
) -> None:
    fast, whole = responder(kind, options), responder(kind, options)
    fast.id, fast.created = whole.id, whole.created
    of = request(logprobs)
    for update in updates(logprobs):
        for index in (0, 1):
            expected = "".join(map(whole.frame, whole.events(index, of, update)))
            assert fast.frames(index, of, update) == expected


def test_what_is_around_a_text_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = responder("completion", ResponseOptions())
    built = []
    chunk = Responder.chunk
    monkeypatch.setattr(
        Responder, "chunk", lambda self, choices: built.append(choices) or chunk(self, choices)
    )
    frames = [answer.frames(0, request(), Update([3], "x", [], None)) for _ in range(9)]
    assert len(built) == 2  # the first, which may have more, and the one around all others
    assert len(set(frames)) == 1
    assert json.loads(frames[0].removeprefix("data: "))["choices"][0]["text"] == "x"
