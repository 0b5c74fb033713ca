"""`/v1/responses` by openai's own client: texts, items, events, tools, formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.http.responses_api import ResponseBody

OPTIONS: dict[str, Any] = {
    "model": "tiny",
    "input": "How warm?",
    "temperature": 0.8,
    "max_output_tokens": 12,
    "extra_body": {"seed": 1},
}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}},
        "required": ["unit"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def server(chat_target: Target, live_server: Callable) -> Any:
    return live_server(chat_target, Ngram(min_n=1, max_n=3), EngineConfig(k=3, max_batch=4))


def test_a_text_is_the_chat_endpoints(server: Any, client: openai.OpenAI) -> None:
    response = client.responses.create(**OPTIONS, instructions="Say.", store=False)
    messages = [{"role": "system", "content": "Say."}, {"role": "user", "content": "How warm?"}]
    chat = {"messages": messages, "temperature": 0.8, "max_tokens": 12, "seed": 1}
    told = server.http.post("/v1/chat/completions", json=chat).json()
    assert response.output_text == told["choices"][0]["message"]["content"]
    assert (
        response.status == "incomplete"
        and response.incomplete_details.reason == "max_output_tokens"
    )
    assert response.usage.input_tokens == told["usage"]["prompt_tokens"]
    assert response.usage.output_tokens == 12 and response.id.startswith("resp_")
    whole = server.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2})
    ResponseBody.model_validate(whole.json(), strict=True)


CALLED = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C"}}\n</tool_call>'


def test_a_stream_is_the_response_in_events(client: openai.OpenAI, scripted: Callable) -> None:
    scripted(f"<think>\nso\n</think>\n\nLet me see.\n{CALLED}\nAgain.\n{CALLED}")
    whole = client.responses.create(**OPTIONS, tools=[WEATHER])
    kinds = ["reasoning", "message", "function_call", "message", "function_call"]
    assert [item.type for item in whole.output] == kinds
    assert whole.output_text == "Let me see.Again."
    assert [json.loads(call.arguments) for call in whole.output[2::2]] == [{"unit": "C"}] * 2
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    events = list(client.responses.create(**OPTIONS, tools=[WEATHER], stream=True))
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
    with client.responses.stream(**OPTIONS, tools=[WEATHER]) as stream:
        assert bare(stream.get_final_response()) == bare(whole)
    scripted("")
    (message,) = client.responses.create(**OPTIONS).output
    assert (message.type, message.content[0].text) == ("message", "")


def test_a_loop_of_tools(server: Any, client: openai.OpenAI) -> None:
    options = OPTIONS | {
        "max_output_tokens": 90,
        "tools": [WEATHER],
        "reasoning": {"effort": "none"},
    }
    for choice in ("required", {"type": "function", "name": "weather"}):
        first = client.responses.create(**options, tool_choice=choice, parallel_tool_calls=False)
        (call,) = first.output
        assert first.status == "completed" and json.loads(call.arguments)["unit"] in ("C", "F")
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "How warm?"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "21"},
    ]
    second = client.responses.create(**OPTIONS | {"input": items})
    messages = [
        {"role": "user", "content": "How warm?"},
        {
            "role": "assistant", "reasoning_content": "hm", "content": None,
            "tool_calls": [{"id": call.call_id, "type": "function", "function": {"name": "weather", "arguments": call.arguments}}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "21"},
    ]  # fmt: skip
    count = server.http.post("/tokenize", json={"messages": messages}).json()["count"]
    assert second.usage.input_tokens == count


class Answer(BaseModel):
    unit: Literal["C", "F"]


def test_a_parsed_format(client: openai.OpenAI) -> None:
    options = OPTIONS | {
        "max_output_tokens": 90,
        "reasoning": {"effort": "none"},
        "temperature": 0.1,
    }
    for seed in range(5):
        parsed = client.responses.parse(
            **options | {"extra_body": {"seed": seed}}, text_format=Answer
        )
        # Space between JSON's parts may take all tokens of a random model.
        if parsed.status == "completed":
            assert parsed.output_parsed.unit in ("C", "F")
            return
    raise AssertionError("no answer was completed")


@pytest.mark.parametrize("change, param", [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"background": 0}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
    ({"input": "x" * 1000}, "input"),
    ({"max_output_tokens": 999}, "max_output_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"text": {"verbosity": "low"}}, "text"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "y"}}}}, "text"),
])  # fmt: skip
def test_what_is_not_honoured_is_refused(change: dict, param: str, server: Any) -> None:
    response = server.http.post("/v1/responses", json={"input": "x", **change})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param
    assert error["message"] and "\n" not in error["message"]
