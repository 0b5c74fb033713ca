from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.serve.config import EngineConfig
from tests.waiting import wait_until

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPT = "def draft(self, tokens):\n    return"


@pytest.fixture(scope="module")
def server(target: Target, live_server: Callable) -> Any:
    return live_server(target, Ngram(min_n=1, max_n=3), EngineConfig(k=3, max_batch=4))


def test_openai_client_completes_and_streams_the_same(
    client: openai.OpenAI, target: Target
) -> None:
    whole = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
    )
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    ids = target.tokenizer()(PROMPT)["input_ids"]
    expected = target.tokenizer().decode(
        target.answer([ids], max_new_tokens=12, ignore_eos=True)[0]
    )
    assert whole.choices[0].text == expected
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert whole.choices[0].finish_reason == "length"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    for usage in (whole.usage, chunks[-1].usage):
        assert (
            usage.prompt_tokens == len(ids)
            and usage.completion_tokens == 12
            and usage.total_tokens == len(ids) + 12
        )


def test_openai_client_chats_and_streams_the_same(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "print the names"}]
    options = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 9}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        == whole.choices[0].message.content
    )
    assert whole.choices[0].message.role == "assistant" and whole.object == "chat.completion"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_several_prompts_and_choices_come_in_order(server: Any) -> None:
    prompts = ["import os", PROMPT]
    together = server.complete(
        prompts, n=2, seed=5, temperature=0.8, max_tokens=8, return_token_ids=True
    ).json()
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    for number, prompt in enumerate(prompts):
        alone = server.complete(
            prompt, seed=5, temperature=0.8, max_tokens=8, return_token_ids=True
        ).json()
        assert together["choices"][2 * number]["token_ids"] == alone["choices"][0]["token_ids"]
    assert together["choices"][0]["token_ids"] != together["choices"][1]["token_ids"]
    assert together["usage"]["completion_tokens"] == sum(
        len(choice["token_ids"]) for choice in together["choices"]
    )


def test_logprobs_of_both_endpoints(client: openai.OpenAI) -> None:
    text = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=5, logprobs=2, temperature=0
    ).choices[0]
    assert (
        len(text.logprobs.tokens)
        == len(text.logprobs.token_logprobs)
        == len(text.logprobs.top_logprobs)
        == 5
    )
    # Greedy takes the likeliest token, so nothing in the list beats it.
    assert all(
        max(top.values()) == own
        for top, own in zip(text.logprobs.top_logprobs, text.logprobs.token_logprobs)
    )
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in content)


def test_a_stop_string_is_not_part_of_the_answer(server: Any) -> None:
    whole = server.complete(PROMPT, **GREEDY).json()["choices"][0]["text"]
    stop = next(c for c in whole[2:] if c.isascii() and c.isprintable())
    choice = server.complete(PROMPT, **GREEDY, stop=[stop]).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["text"] == whole[: whole.index(stop)]
    events = server.events("/v1/completions", prompt=PROMPT, **GREEDY, stop=stop)
    streamed = "".join(event["choices"][0]["text"] for event in events)
    assert streamed == choice["text"]


NESTED: dict = {}
for _ in range(300):
    NESTED = {"a": NESTED}

BAD = [
    ({"flavour": 1}, "flavour"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 9999}, "max_tokens"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"three": 1}}, "logit_bias"),
    ({"logit_bias": {"3": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"bad_words": [""]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"tools": []}, "tools"),
    ({"guided_json": {"type": "null"}}, "guided_json"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": 2**40}, "priority"),
    ({"structural_tag": "x"}, "structural_tag"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "y"}},
            }
        },
        "response_format",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
        "structured_outputs",
    ),
    ({"n": 128, "prompt": ["a", "b", "c"]}, "prompt"),
    ({"\ud800": 1}, None),
    ({"logprobs": 50}, "logprobs"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 129}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"bad_words": ["a"] * 1025}, "bad_words"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"metadata": NESTED}, "metadata"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"speculation": {"depth": 3}}, "speculation"),
    ({"speculation": {"k": 100}}, "speculation"),
    ({"speculation": {"draft_temperature": -1}}, "speculation"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": "x" * 1000}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"request_class": "\ud800"}, "request_class"),
    ({"temperature": float("nan")}, "temperature"),
    ({"seed": 2**70}, "seed"),
]


@pytest.mark.parametrize("change, param", BAD, ids=[str(change)[:40] for change, _ in BAD])
def test_bad_input_is_an_openai_error_of_one_sentence(
    change: dict, param: str | None, server: Any
) -> None:
    content = json.dumps({"model": "tiny", "prompt": "hi", **change})
    response = server.http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert (
        error["type"] == "invalid_request_error"
        and error["message"]
        and "\n" not in error["message"]
    )
    assert param is None or error["param"] == param
    assert f"{param!r} is required" not in error["message"]  # it is there
    assert change != {"prompt": []} or "give a text, token ids" in error["message"]
    # The server goes on.
    assert server.complete("hi", max_tokens=1).status_code == 200


CHAT_BAD = [
    ({"messages": [{"role": "assistant", "content": "x", "annotations": [NESTED]}]}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 1000}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    # The tiny model's chat template has no place for tools, nor for effort.
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"verbosity": "low"}, "verbosity"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 99999}, "max_completion_tokens"),
    ({"echo": True}, "echo"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
]


@pytest.mark.parametrize(
    "change, param", CHAT_BAD, ids=[str(change)[:40] for change, _ in CHAT_BAD]
)
def test_bad_chat_input_is_refused(change: dict, param: str, server: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **change}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["message"]
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("content, headers", [
    (b"{bad", {"content-type": "application/json"}),
    (b"{bad", {}),
    (b"[1]", {"content-type": "application/json"}),
    (b"", {"content-type": "application/json"}),
    (b"\xff\xfe", {"content-type": "application/json"}),
])  # fmt: skip
def test_what_is_no_json_object_is_refused(content: bytes, headers: dict, server: Any) -> None:
    response = server.http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_other_models_and_paths_are_not_found(server: Any) -> None:
    missing = server.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    for response in (server.http.get("/v1/nothing"), server.http.get("/v1/completions")):
        assert response.status_code in (404, 405) and response.json()["error"]["message"]
    assert response.headers["allow"] == "POST"


def test_a_tokenizer_without_chat_template_refuses_chat(
    tiny_target: Callable[..., str], live_server: Callable
) -> None:
    target = Target.load(tiny_target("llama"))
    target.tokenizer().chat_template = None
    server = live_server(target, None, EngineConfig())
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and "chat template" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(
    stream: bool, target: Target, live_server: Callable
) -> None:
    server = live_server(target, None, EngineConfig(max_batch=1)).slow(0.05)
    stats = server.engine.stats
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream}
    with (
        httpx.Client(base_url=server.url, timeout=0.7) as client,
        pytest.raises(httpx.TimeoutException),
    ):
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as response:
                for count, _ in enumerate(response.iter_lines()):
                    if count == 3:
                        raise httpx.ReadTimeout("the reader has had enough")
        else:
            client.post("/v1/completions", json=body)
    wait_until(lambda: stats.finished["abort"] == 1)
    assert not server.engine.scheduler.busy
    assert server.engine.scheduler.blocks.num_free == server.engine.scheduler.blocks.num_usable
