"""Chunks of a stream: what is encoded once around a text gives the bytes of the whole body; tokens
as parts of a text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.serve.http.chat import ChatResponder
from draftsmith.serve.http.protocol import ChatRequest, CompletionRequest
from draftsmith.serve.http.responses import ChoicesResponder, CompletionResponder
from draftsmith.serve.http.tokens import TokenPrompt, TokenTexts
from draftsmith.serve.requests.request import FinishReason, Request, TokenLogprob, Update
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.tools.answer import AnswerForm, ReasoningFormat, Thinking
from draftsmith.text_stream import TextStream
from tests.tokenizer_kinds import ALL, FALLBACKS, TOKENIZER

TEXTS = [" def", "", '"\\\n\t\0', "\u2028\x85\u00e9\U0001f600", "text", ""]
PROMPT = TokenPrompt([1, 2], "p")


class Letters:
    def decode(self, token_ids: list[int], **options: bool) -> str:
        return "".join(chr(97 + token) for token in token_ids)


def request(logprobs: int | None = None) -> Request:
    params = SamplingParams(logprobs=logprobs)
    return Request("r", [1, 2], 2, params, seed=0, k=0, max_tokens=99)


def updates(logprobs: int | None) -> list[Update]:
    entries = [] if logprobs is None else [TokenLogprob(3, -1.0, [(3, -1.0)])]
    ends = [None] * (len(TEXTS) - 1) + [FinishReason.LENGTH]
    return [Update([3], text, entries, end) for text, end in zip(TEXTS, ends, strict=True)]


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
RUNNING = {"include_usage": True, "continuous_usage_stats": True}


def chat_request(**asked: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": "x"}], **asked)


def responder(kind: str, asked: dict[str, Any]) -> ChoicesResponder:
    if kind == "completion":
        body = CompletionRequest(prompt="p", n=2, **asked)
        return CompletionResponder('a "model"', Letters(), body, [PROMPT])
    form = AnswerForm()
    if kind == "chat that reasons":
        form = AnswerForm(reasoning=ReasoningFormat("<a>", "</a>"), thinking=Thinking.MAYBE)
    return ChatResponder('a "model"', Letters(), chat_request(n=2, **asked), [PROMPT], form=form)


KINDS = ["completion", "chat", "chat that reasons"]
ASKED: list[dict[str, Any]] = [
    {},
    USAGE,
    USAGE | {"stream_options": RUNNING},
    {"return_token_ids": True},
]
OF_COMPLETIONS: list[dict[str, Any]] = [{"echo": True}, {"echo": True, "max_tokens": 0}]


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize(
    "kind, asked",
    [*itertools.product(KINDS, ASKED), *(("completion", asked) for asked in OF_COMPLETIONS)],
    ids=repr,
)
def test_a_chunk_has_the_bytes_of_its_body(
    kind: str, logprobs: int | None, asked: dict[str, Any]
) -> None:
    fast, whole = responder(kind, asked), responder(kind, asked)
    fast.id, fast.created = whole.id, whole.created
    of = request(logprobs)
    for update in updates(logprobs):
        for index in (0, 1):
            expected = "".join(map(whole.frame, whole.events(index, of, update)))
            assert fast.frames(index, of, update) == expected


def answered(text: str, prompt: str, kind: str, sizes: list[int], stop: str = "") -> Any:
    """Logprobs of a completion, whole and as the pieces of a stream, and its text."""
    tokenizer, asked = ALL[kind], CompletionRequest(prompt=prompt)
    context, tokens = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text)
    )
    params = SamplingParams(logprobs=0)
    of = Request("r", [*context, *tokens], len(context), params, seed=0, k=0, max_tokens=99)
    whole, pieces = (
        CompletionResponder("m", tokenizer, asked, [TokenPrompt(context, prompt)]) for _ in range(2)
    )
    stream = TextStream(tokenizer, context=context, stop=[stop] if stop else ())
    streamed: Any = {"text": "", "text_offset": [], "tokens": []}
    at = 0
    while at < len(tokens):
        size = sizes[at % len(sizes)]
        part = tokens[at : at + size]
        entries = [TokenLogprob(token, -1.0, []) for token in part]
        of.logprobs += entries
        step, at = stream.push(part).text, at + size
        update = Update(part, step + (stream.finish() if at >= len(tokens) else ""), entries, None)
        choice = pieces.delta(0, of, update)
        of.text += choice["text"]
        for name in ("text_offset", "tokens"):
            streamed[name] += choice["logprobs"][name]
    return of, whole.choice(0, of)["logprobs"], streamed


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(st.sampled_from("a 日é😀x"), min_size=1, max_size=12),
    kind=st.sampled_from(["byte level", "gemma"]),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_offsets_are_where_a_token_begins_in_the_text(
    text: str, kind: str, sizes: list[int]
) -> None:
    of, whole, streamed = answered(text, "a", kind, sizes)
    assert of.text == text and whole["text_offset"] == streamed["text_offset"]
    # A token that is part of a character begins where it does.
    data, expected = b"", []
    for entry in of.logprobs:
        expected.append(len(data.decode(errors="ignore")))
        data += bytes(TokenTexts(ALL[kind]).bytes(entry.token) or ())
    assert data.decode() == text and whole["text_offset"] == expected


def test_a_stop_string_in_wait_moves_no_offset() -> None:
    _, whole, streamed = answered("aENaENxE", "x", "byte level", [1], stop="END")
    begins = [0, *itertools.accumulate(map(len, whole["tokens"]))][:-1]
    assert whole["text_offset"] == streamed["text_offset"] == begins


@pytest.mark.parametrize("kind", ["byte level", *FALLBACKS])
def test_bytes_of_tokens_join_to_the_text(kind: str) -> None:
    text = "a 😀日 é ex"
    texts = TokenTexts(ALL[kind])
    tokens = ALL[kind]("a" + text, add_special_tokens=False)["input_ids"]
    data = bytes(byte for token in tokens for byte in texts.bytes(token) or ())
    assert data.decode().endswith(text)
    assert texts.bytes(ALL[kind].eos_token_id) == list(b"<eos>")


def test_entries_of_chat_logprobs_have_the_bytes_of_parts_of_characters() -> None:
    answer = ChatResponder("m", TOKENIZER, chat_request(), [PROMPT])
    of = request(logprobs=1)
    tokens = TOKENIZER("😀", add_special_tokens=False)["input_ids"]
    entries = [TokenLogprob(token, -1.0, [(token, -1.0)]) for token in tokens]
    told = answer.delta(0, of, Update(tokens, "😀", entries, None))["logprobs"]["content"]
    assert len(told) == 4 and bytes(byte for one in told for byte in one["bytes"]) == "😀".encode()
    assert all(one["top_logprobs"][0]["bytes"] == one["bytes"] for one in told)
