"""Tools, reasoning and harmless fields over HTTP, with a template like Qwen's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.http.schema import ChatBody

CHAT: Any = [{"role": "user", "content": "How warm?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a day",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "day": {"type": "boolean"}},
            "required": ["unit", "day"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
OPTIONS: dict[str, Any] = {
    "model": "tiny",
    "messages": CHAT,
    "temperature": 0.8,
    "seed": 1,
    "max_tokens": 120,
}


@pytest.fixture(scope="module")
def server(chat_target: Target, live_server: Callable) -> Any:
    return live_server(chat_target, Ngram(min_n=1, max_n=3), EngineConfig(k=3, max_batch=4))


def prompt_of(server: Any, messages: list, **options: object) -> str:
    body = {"messages": messages, **options}
    tokens = server.http.post("/tokenize", json=body).json()["tokens"]
    return server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_messages_of_a_tool_loop_reach_the_template(server: Any) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"unit": "C"}'},
    }
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "21"}]},
        {"role": "developer", "content": "x"},
    ]
    assert prompt_of(server, messages) == (
        "<user>How warm?<assistant>(hm)[weather C]<tool>21#c1<system>x<assistant>"
    )
    offered = prompt_of(server, CHAT, tools=[TIME])
    assert offered == "time <tool_call>\n<user>How warm?<assistant>"


def test_fields_that_cannot_change_an_answer_change_none(server: Any) -> None:
    harmless = {
        "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x", "user": "u",
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "modalities": ["text"], "tools": [], "tool_choice": "none",
        "parallel_tool_calls": True, "verbosity": "medium", "prediction": {"type": "content", "content": "x"},
        "functions": None, "reasoning_effort": None, "include_reasoning": True, "prompt_cache_options": {"mode": "auto"},
        "audio": None, "web_search_options": None, "moderation": None, "suffix": None,
    }  # fmt: skip
    short = OPTIONS | {"max_tokens": 9}
    plain = server.http.post("/v1/chat/completions", json=short).json()["choices"]
    with_all = {name: value for name, value in (short | harmless).items() if name != "model"}
    for body in (short | harmless, with_all, short | {"tool_choice": "auto"}):
        response = server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200 and response.json()["choices"] == plain
    text = {"prompt": "x", "seed": 1, "user": "u", "store": False, "metadata": {}}
    assert server.http.post("/v1/completions", json=text).status_code == 200


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forced_choice_is_always_a_valid_call(
    choice: Any, temperature: float, client: openai.OpenAI
) -> None:
    options: Any = OPTIONS | {
        "tools": [WEATHER, TIME],
        "tool_choice": choice,
        "temperature": temperature,
    }
    options |= {"parallel_tool_calls": False, "reasoning_effort": "none"}
    for seed in range(2 if temperature > 0 else 1):
        whole = client.chat.completions.create(**options | {"seed": seed}).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        (call,) = whole.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert choice == "required" or call.function.name == "weather"
        if call.function.name == "weather":
            assert arguments["unit"] in ("C", "F") and isinstance(arguments["day"], bool)
        with client.chat.completions.stream(**options | {"seed": seed}) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert [one.function.name for one in streamed.message.tool_calls] == [call.function.name]
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments


def test_greedy_calls_are_the_targets_alone(server: Any) -> None:
    body = OPTIONS | {"tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    body |= {"parallel_tool_calls": False, "reasoning_effort": "none", "return_token_ids": True}
    drafted, alone = (
        server.http.post("/v1/chat/completions", json=body | {"speculation": {"k": k}}).json()
        for k in (3, 0)
    )
    assert drafted["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


def test_a_choice_of_none_shows_no_tools(server: Any) -> None:
    short = OPTIONS | {"max_tokens": 9}
    plain = server.http.post("/v1/chat/completions", json=short).json()
    body = short | {"tools": [WEATHER], "tool_choice": "none"}
    none = server.http.post("/v1/chat/completions", json=body).json()
    assert none["choices"] == plain["choices"] and none["usage"] == plain["usage"]


CALLED = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>'


@pytest.mark.parametrize("tools", [[WEATHER], []])
def test_a_call_that_the_model_makes_itself(
    tools: list, server: Any, client: openai.OpenAI, scripted: Callable
) -> None:
    scripted(f"<think>\nso\n</think>\n\n{CALLED}")
    body = {**OPTIONS, "tools": tools, "ignore_eos": True, "max_tokens": 3, "stop": ["x"]}
    told = server.http.post("/v1/chat/completions", json=body).json()
    ChatBody.model_validate(told, strict=True)
    message = told["choices"][0]["message"]
    assert told["choices"][0]["finish_reason"] == ("tool_calls" if tools else "stop")
    assert message["reasoning_content"] == "so"
    assert message["content"] == ("Let me see." if tools else CALLED)
    if tools:
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"unit": "C"}'} and call["id"]
    chunks = list(
        client.chat.completions.create(**{**OPTIONS, "max_tokens": 3}, tools=tools, stream=True)
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == message["content"]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "so"
    made = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.function.name for call in made] == (["weather"] if tools else [])
    hidden = {**OPTIONS, "include_reasoning": False}
    told = server.http.post("/v1/chat/completions", json=hidden).json()
    assert "reasoning_content" not in told["choices"][0]["message"]


@pytest.mark.parametrize("tools", [[], [WEATHER]])
def test_formats_and_calls_come_behind_reasoning(tools: list, server: Any) -> None:
    body = OPTIONS | {
        "tools": tools,
        "structured_outputs": {"choice": ["yes", "no"]},
        "max_tokens": 60,
    }
    for thinking in (True, False):
        variables = {"chat_template_kwargs": {"enable_thinking": thinking}}
        told = server.http.post("/v1/chat/completions", json=body | variables).json()["choices"][0]
        message = told["message"]
        if thinking:  # for ever: the model is random
            assert told["finish_reason"] == "length" and message["reasoning_content"]
            assert not message["content"]
        else:
            assert message["content"] in ("yes", "no") or message["tool_calls"]


def test_no_effort_is_no_thinking_where_the_template_has_that(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = OPTIONS | {"max_tokens": 2}
    off = body | {"chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True}
    told = server.http.post("/v1/chat/completions", json=off).json()
    none = body | {"reasoning_effort": "none", "return_token_ids": True}
    assert (
        server.http.post("/v1/chat/completions", json=none).json()["prompt_token_ids"]
        == told["prompt_token_ids"]
    )
    refused = server.http.post("/v1/chat/completions", json=body | {"reasoning_effort": "high"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning_effort"


HALF = "\ud83d"
NESTED: Any = {"a": [{"b": HALF}]}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": "{}"}}


def with_call(**change: Any) -> Any:
    function = CALL["function"] | change
    return [*CHAT, {"role": "assistant", "tool_calls": [CALL | {"function": function}]}]


@pytest.mark.parametrize("path, change, param", [
    ("/v1/chat/completions", {"messages": with_call(arguments='{"q": "\\ud83d"}')}, "messages"),
    ("/v1/chat/completions", {"messages": with_call(arguments='{"q": [{"\\ude00": 1}]}')}, "messages"),
    ("/v1/chat/completions", {"messages": with_call(name=HALF)}, "messages"),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "t", "parameters": NESTED}}]}, "tools"),
    ("/v1/chat/completions", {"chat_template_kwargs": NESTED}, "chat_template_kwargs"),
    ("/v1/chat/completions", {"chat_template_kwargs": {HALF: 1}}, "chat_template_kwargs"),
    ("/v1/chat/completions", {"metadata": NESTED}, "metadata"),
    ("/v1/chat/completions", {"metadata": {"a": float("nan")}}, "metadata"),
    ("/v1/chat/completions", {"structured_outputs": {"json": '{"const": "\\ud83d"}'}}, "structured_outputs"),
    ("/v1/chat/completions", {"structured_outputs": {"json": HALF}}, "structured_outputs"),
    ("/v1/completions", {"structured_outputs": {"json": {"const": HALF}}}, "structured_outputs"),
    ("/v1/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NESTED}}}, "response_format"),
    ("/v1/completions", {"metadata": {"a": float("inf")}}, "metadata"),
    ("/v1/completions", {"logit_bias": {HALF: 1}}, "logit_bias"),
    ("/v1/completions", {HALF: 1}, None),
    ("/tokenize", {"messages": with_call(arguments='{"q": "\\ud83d"}')}, "messages"),
    ("/tokenize", {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "t", "parameters": NESTED}}]}, "tools"),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", "name": "time", "arguments": '{"q": "\\ud83d"}'}]}, "input"),
    ("/v1/responses", {"metadata": NESTED}, "metadata"),
    ("/v1/responses", {"tools": [{"type": "function", "name": "t", "parameters": NESTED}]}, "tools"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": NESTED}}}, "text"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_text_is_refused_wherever_it_stands(
    path: str, change: dict, param: str, stream: bool, server: Any
) -> None:
    least = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    body = least.get(path, {"messages": CHAT}) | ({} if path == "/tokenize" else {"stream": stream})
    # Escaped, as half a pair cannot be sent otherwise.
    content, headers = json.dumps(body | change), {"content-type": "application/json"}
    response = server.http.post(path, content=content, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_arguments_that_json_cannot_write_stay_a_text(server: Any) -> None:
    for number in ("1e999", "NaN", "-Infinity"):
        messages = with_call(name="weather", arguments=f'{{"unit": {number}}}')
        assert server.http.post("/tokenize", json={"messages": messages}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_stream_that_cannot_be_built_ends_with_an_error(
    path: str, server: Any, scripted: Callable
) -> None:
    scripted("abc" + HALF + "def")
    if path == "/v1/responses":
        told = server.http.post(path, json={"input": "x", "stream": True}).text
        assert told.strip().split("\n\n")[-1].startswith("event: error")
    else:
        prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT}
        assert server.events(path, **prompt)[-1]["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_that_is_continued_within_its_reasoning_goes_on_with_it(
    stream: bool, server: Any, scripted: Callable
) -> None:
    scripted(" so</think>\n\nYes")
    body = OPTIONS | {
        "messages": [*CHAT, {"role": "assistant", "content": "<think>\nLet me see"}],
        "continue_final_message": True,
        "stream": stream,
    }
    if stream:
        events = server.events("/v1/chat/completions", **body)
        parts = [event["choices"][0]["delta"] for event in events]
    else:
        response = server.http.post("/v1/chat/completions", json=body)
        parts = [response.json()["choices"][0]["message"]]
    told = {"reasoning_content": "", "content": ""}
    for part in parts:
        for name in told:
            told[name] += part.get(name) or ""
    assert told == {"reasoning_content": " so", "content": "Yes"}
