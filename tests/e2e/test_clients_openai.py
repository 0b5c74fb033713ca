"""The openai package against `draftsmith serve` with and without drafts: typed answers, the same
greedy ones, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PROMPT = "def draft(self, tokens):\n    return"
CHAT: list[Any] = [{"role": "user", "content": "print the names"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def servers(start_server: Callable, near_draft: str) -> dict[str, Any]:
    return {"on": start_server("--draft", near_draft, "--k", "3"), "off": start_server()}


@pytest.fixture(scope="module")
def clients(servers: dict[str, Any]) -> dict[str, openai.OpenAI]:
    return {
        name: openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for name, server in servers.items()
    }


def test_answers_are_the_same_with_and_without_drafts(
    servers: dict[str, Any], clients: dict[str, openai.OpenAI]
) -> None:
    shapes: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"stop": ["re"]},
        {"n": 2},
        {"logit_bias": {"80": 3}, "presence_penalty": 0.7},
        {"extra_body": {"repetition_penalty": 1.3, "min_tokens": 20, "bad_words": ["token"]}},
        {"echo": True},
    ]
    for shape in shapes:
        told = [
            client.completions.create(prompt=PROMPT, **GREEDY, **shape)
            for client in clients.values()
        ]
        on, off = ([(c.text, c.finish_reason) for c in body.choices] for body in told)
        assert on == off, shape
        if told[0].choices[0].logprobs:
            values = [body.choices[0].logprobs.token_logprobs for body in told]
            assert values[0] == pytest.approx(values[1], abs=1e-3)
    accepted = servers["on"].metric("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted < servers["on"].metric("vllm:spec_decode_num_draft_tokens_total")


def test_a_seed_repeats_and_choices_differ(clients: dict[str, openai.OpenAI]) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": 20,
        "n": 3,
        "seed": 11,
        "temperature": 0.9,
    }
    first, second = (clients["on"].chat.completions.create(**options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices] and len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]


def test_a_stream_is_the_answer_in_pieces(clients: dict[str, openai.OpenAI]) -> None:
    client = clients["on"]
    options: dict[str, Any] = {**GREEDY, "messages": CHAT, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    pieces = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in pieces] == [
        entry.token for entry in whole.choices[0].logprobs.content
    ]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(pieces)


def test_many_at_a_time_from_asyncio(
    clients: dict[str, openai.OpenAI], servers: dict[str, Any]
) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{servers['on'].url}/v1", api_key="none", max_retries=0
        ) as client:
            prompts = [f"{PROMPT} name{number}" for number in range(12)]
            return await asyncio.gather(
                *(client.completions.create(prompt=prompt, **GREEDY) for prompt in prompts)
            )

    together = [body.choices[0].text for body in asyncio.run(ask())]
    alone = [
        clients["off"].completions.create(prompt=f"{PROMPT} name{number}", **GREEDY).choices[0].text
        for number in range(12)
    ]
    assert together == alone


def test_structured_answers(clients: dict[str, openai.OpenAI]) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    texts = [
        client.chat.completions.create(
            model="tiny", messages=CHAT, temperature=0, response_format=form
        )
        .choices[0]
        .message.content
        for client in clients.values()
    ]
    assert texts[0] == texts[1] and isinstance(json.loads(texts[0])["ok"], bool)


def test_errors_are_typed(clients: dict[str, openai.OpenAI]) -> None:
    client = clients["on"]
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=10_000)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="tiny", messages=CHAT, extra_body={"flavour": 1})
    assert unknown.value.param == "flavour" and unknown.value.code == "unknown_parameter"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=PROMPT)
