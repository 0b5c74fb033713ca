"""Tools, reasoning and harmless fields over HTTP, with a template like Qwen's; and `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.serve.config import EngineConfig

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
OPTIONS: dict[str, Any] = {"model": "tiny", "messages": CHAT, "temperature": 0.8}
OPTIONS |= {"seed": 1, "max_tokens": 120}


@pytest.fixture(scope="module")
def server(chat_target: Target, live_server: Callable) -> Any:
    return live_server(chat_target, Suffix(), EngineConfig(k=3, max_batch=4))


def prompt_of(server: Any, messages: list, **options: object) -> str:
    body = {"messages": messages, **options}
    tokens = server.told("/tokenize", **body)["tokens"]
    return server.told("/detokenize", tokens=tokens)["prompt"]


def test_messages_of_a_tool_loop_reach_the_template(server: Any) -> None:
    function = {"name": "weather", "arguments": '{"unit": "C"}'}
    call = {"id": "c1", "type": "function", "function": function}
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
    plain = server.told("/v1/chat/completions", **short)["choices"]
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
    options: Any = OPTIONS | {"tools": [WEATHER, TIME], "tool_choice": choice}
    options |= {"temperature": temperature}
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
        server.told("/v1/chat/completions", **(body | {"speculation": {"k": k}})) for k in (3, 0)
    )
    assert drafted["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


def test_a_choice_of_none_shows_no_tools(server: Any) -> None:
    short = OPTIONS | {"max_tokens": 9}
    plain = server.told("/v1/chat/completions", **short)
    body = short | {"tools": [WEATHER], "tool_choice": "none"}
    none = server.told("/v1/chat/completions", **body)
    assert none["choices"] == plain["choices"] and none["usage"] == plain["usage"]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>'
CALLED = f"Let me see.\n{CALL}"


@pytest.mark.parametrize("tools", [[WEATHER], []])
def test_a_call_that_the_model_makes_itself(
    tools: list, server: Any, client: openai.OpenAI, scripted: Callable
) -> None:
    scripted(f"<think>\nso\n</think>\n\n{CALLED}")
    body = {**OPTIONS, "tools": tools, "ignore_eos": True, "max_tokens": 3, "stop": ["x"]}
    told = server.told("/v1/chat/completions", **body)
    ChatCompletion.model_validate(told, strict=True)
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
    told = server.told("/v1/chat/completions", **hidden)
    assert "reasoning_content" not in told["choices"][0]["message"]


@pytest.mark.parametrize("tools", [[], [WEATHER]])
def test_formats_and_calls_come_behind_reasoning(tools: list, server: Any) -> None:
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    body = OPTIONS | form | {"tools": tools, "max_tokens": 60}
    for thinking in (True, False):
        variables = {"chat_template_kwargs": {"enable_thinking": thinking}}
        told = server.told("/v1/chat/completions", **(body | variables))["choices"][0]
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
    told = server.told("/v1/chat/completions", **off)
    none = body | {"reasoning_effort": "none", "return_token_ids": True}
    assert (
        server.told("/v1/chat/completions", **none)["prompt_token_ids"] == told["prompt_token_ids"]
    )
    refused = server.http.post("/v1/chat/completions", json=body | {"reasoning_effort": "high"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_stream_that_cannot_be_built_ends_with_an_error(
    path: str, server: Any, scripted: Callable
) -> None:
    scripted("abc\ud83ddef")
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
    messages = [*CHAT, {"role": "assistant", "content": "<think>\nLet me see"}]
    body = OPTIONS | {"messages": messages, "continue_final_message": True, "stream": stream}
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


# The API of responses, by openai's own client.
RESPONSE: dict[str, Any] = {
    "model": "tiny", "input": "How warm?", "temperature": 0.8, "max_output_tokens": 12,
    "extra_body": {"seed": 1},
}  # fmt: skip
FLAT: Any = {"type": "function", **WEATHER["function"], "strict": True}


def test_a_text_is_the_chat_endpoints(server: Any, client: openai.OpenAI) -> None:
    response = client.responses.create(**RESPONSE, instructions="Say.", store=False)
    messages = [{"role": "system", "content": "Say."}, {"role": "user", "content": "How warm?"}]
    chat = {"messages": messages, "temperature": 0.8, "max_tokens": 12, "seed": 1}
    told = server.told("/v1/chat/completions", **chat)
    assert response.output_text == told["choices"][0]["message"]["content"]
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.input_tokens == told["usage"]["prompt_tokens"]
    assert response.usage.output_tokens == 12 and response.id.startswith("resp_")
    whole = server.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2}).json()
    whole["usage"]["input_tokens_details"]["cache_write_tokens"] = 0  # of OpenAI's alone
    Response.model_validate(whole, strict=True)


def test_a_stream_is_the_response_in_events(client: openai.OpenAI, scripted: Callable) -> None:
    scripted(f"<think>\nso\n</think>\n\n{CALLED}\nAgain.\n{CALL}")
    whole = client.responses.create(**RESPONSE, tools=[FLAT])
    kinds = ["reasoning", "message", "function_call", "message", "function_call"]
    assert [item.type for item in whole.output] == kinds
    assert whole.output_text == "Let me see.Again."
    assert [json.loads(call.arguments) for call in whole.output[2::2]] == [{"unit": "C"}] * 2
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    events = list(client.responses.create(**RESPONSE, tools=[FLAT], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert events[-1].type == f"response.{last.status}" == "response.completed"

    def bare(response: Any) -> list[dict[str, Any]]:
        items = [item.model_dump(exclude_none=True) for item in response.output]
        own = ("id", "call_id", "parsed_arguments")  # the last is the client's
        return [{k: v for k, v in item.items() if k not in own} for item in items]

    assert bare(last) == bare(whole)
    for index, item in enumerate(last.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added" and own[0].item.id == item.id
        assert own[-1].type == "response.output_item.done" and own[-1].item == item
        deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert deltas == ["so", "Let me see.", '{"unit": "C"}', "Again.", '{"unit": "C"}'][index]
    with client.responses.stream(**RESPONSE, tools=[FLAT]) as stream:
        assert bare(stream.get_final_response()) == bare(whole)
    scripted("")
    (message,) = client.responses.create(**RESPONSE).output
    assert (message.type, message.content[0].text) == ("message", "")


def test_a_loop_of_tools(server: Any, client: openai.OpenAI) -> None:
    options = RESPONSE | {"max_output_tokens": 90, "tools": [FLAT], "reasoning": {"effort": "none"}}
    for choice in ("required", {"type": "function", "name": "weather"}):
        first = client.responses.create(**options, tool_choice=choice, parallel_tool_calls=False)
        (call,) = first.output
        assert first.status == "completed" and json.loads(call.arguments)["unit"] in ("C", "F")
    thought = {"type": "reasoning", "id": "r", "summary": []}
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "How warm?"}]},
        {**thought, "content": [{"type": "reasoning_text", "text": "hm"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "21"},
    ]
    second = client.responses.create(**RESPONSE | {"input": items})
    messages = [
        {"role": "user", "content": "How warm?"},
        {
            "role": "assistant", "reasoning_content": "hm", "content": None,
            "tool_calls": [{"id": call.call_id, "type": "function", "function": {"name": "weather", "arguments": call.arguments}}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "21"},
    ]  # fmt: skip
    count = server.told("/tokenize", messages=messages)["count"]
    assert second.usage.input_tokens == count


class Answer(BaseModel):
    unit: Literal["C", "F"]


def test_a_parsed_format(client: openai.OpenAI) -> None:
    options = RESPONSE | {"max_output_tokens": 90, "temperature": 0.1}
    options |= {"reasoning": {"effort": "none"}}
    for seed in range(5):
        parsed = client.responses.parse(
            **options | {"extra_body": {"seed": seed}}, text_format=Answer
        )
        # Space between JSON's parts may take all tokens of a random model.
        if parsed.status == "completed":
            assert parsed.output_parsed.unit in ("C", "F")
            return
    raise AssertionError("no answer was completed")
