"""Every body that is refused is an OpenAI error of one sentence about its parameter, and the server
goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.serve.config import EngineConfig
from tests.integration.conftest import MODEL

JSON = {"content-type": "application/json"}
CHAT: Any = [{"role": "user", "content": "x"}]
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
# What a body of a path has beside what is wrong with it.
LEAST: dict[str, Any] = {
    COMPLETIONS: {"prompt": "hi"}, CHATS: {"messages": CHAT}, RESPONSES: {"input": "x"},
}  # fmt: skip
DEEP: Any = {}
for _ in range(300):
    DEEP = {"a": DEEP}


@pytest.fixture(scope="module")
def servers(target: Target, chat_target: Target, live_server: Callable) -> dict[str, Any]:
    """One whose chat template has no place for tools or reasoning, and one that has."""
    config = EngineConfig(k=3, max_batch=4)
    return {
        name: live_server(one, Suffix(), config)
        for name, one in (("plain", target), ("tools", chat_target))
    }


def check_refused(server: Any, path: str, change: Any, param: str | None, **more: Any) -> str:
    """The message of the error."""
    # Escaped, as half a pair of surrogates cannot be sent otherwise.
    content = json.dumps({"model": MODEL} | LEAST.get(path, {}) | more | change)
    response = server.http.post(path, content=content, headers=JSON)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["message"] and "\n" not in error["message"]
    assert param in (None, error["param"])
    assert server.complete("hi", max_tokens=1).status_code == 200
    return error["message"]


# By path and parameter: values that are refused.
WRONG: dict[str, dict[str, list[Any]]] = {
    COMPLETIONS: {
        "flavour": [1],
        "temperature": [-1, "hot", float("nan")],
        "top_p": [0],
        "n": [0],
        "max_tokens": [0, 9999],
        "presence_penalty": [2.5],
        "frequency_penalty": [-3],
        "repetition_penalty": [0],
        "logit_bias": [{"three": 1}, {"3": 101}, {"99999": 1}],
        "bad_words": [[""], ["a"] * 1025],
        "allowed_token_ids": [[], [99999]],
        "stop_token_ids": [[-1], [1] * 1025],
        "echo": ["yes"],
        "suffix": ["x"],
        "best_of": [3],
        "tools": [[]],
        "guided_json": [{"type": "null"}],
        "truncate_prompt_tokens": [0],
        "prompt_logprobs": [21],
        "cache_salt": [""],
        "priority": [2**40],
        "structural_tag": ["x"],
        "response_format": [
            {"type": "yaml"},
            {"type": "json_schema", "json_schema": {"name": "x"}},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "y"}}},
        ],
        "structured_outputs": [
            {},
            {"regex": "a", "choice": ["b"]},
            {"json": "{"},
            {"regex": "("},
            {"choice": []},
        ],
        "logprobs": [50],
        "stop": [[""], ["a"] * 129, "a" * 1025],
        "metadata": [DEEP],
        "stream_options": [{"include_usage": True}],
        "speculation": [{"depth": 3}, {"k": 100}, {"draft_temperature": -1}],
        "prompt": ["", [], [99999], "x" * 1000, None, "\ud800", [1, "a"], [[]]],
        "request_class": ["\ud800"],
        "seed": [2**70],
    },
    CHATS: {
        "messages": [
            [{"role": "assistant", "content": "x", "annotations": [DEEP]}],
            [],
            [{"role": "user", "content": "x", "tool_calls": []}],
            [{"role": "user", "content": "x" * 1000}],
            [{"role": "user", "content": "x" * 1_000_000}],
            [{"role": "user", "content": None}],
            [{"role": "tool", "content": "x"}],
            [{"role": "user", "content": "x", "tool_call_id": "1"}],
        ],
        "top_logprobs": [2],
        "tools": [
            [{"type": "function", "function": {"name": "f"}}],
            [{"type": "function", "function": {"name": "f"}}] * 2,
            [{"type": "web_search"}],
            [{"type": "function", "function": {"name": "a b"}}],
        ],
        "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
        "functions": [[{"name": "f"}]],
        "function_call": ["auto"],
        "reasoning_effort": ["high"],
        "verbosity": ["low"],
        "modalities": [["audio"]],
        "chat_template_kwargs": [{"tools": []}],
        "max_tokens": [0],
        "max_completion_tokens": [99999],
        "echo": [True],
    },
    "/tokenize": {"prompt": [3], "messages": [[]]},
    "/detokenize": {"tokens": [[99999], [-1], "x"]},
    RESPONSES: {
        "previous_response_id": ["resp_1"],
        "conversation": ["c"],
        "background": [True, 0],
        "truncation": ["auto"],
        "input": [
            [],
            [{"type": "item_reference", "id": "x"}],
            [{"type": "function_call_output", "output": "x"}],
            "x" * 1000,
        ],
        "max_output_tokens": [999],
        "tools": [[{"type": "web_search"}]],
        "tool_choice": ["required"],
        "reasoning": [{"effort": "high"}],
        "text": [
            {"verbosity": "low"},
            {"format": {"type": "json_schema", "name": "x", "schema": {"type": "y"}}},
        ],
        "include": [["file_search_call.results"]],
    },
}
# What else is refused, and the parameter that the error names.
TOGETHER: list[tuple[str, Any, str | None]] = [
    (COMPLETIONS, {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (
        COMPLETIONS,
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
        "structured_outputs",
    ),
    (COMPLETIONS, {"n": 128, "prompt": ["a", "b", "c"]}, "prompt"),
    (COMPLETIONS, {"\ud800": 1}, None),
    (CHATS, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (
        CHATS,
        {"add_generation_prompt": True, "continue_final_message": True},
        "add_generation_prompt",
    ),
    (CHATS, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ("/tokenize", {"prompt": "x", "flavour": 1}, "flavour"),
    ("/tokenize", {}, "prompt"),
]
ROWS = [
    *(
        (path, {name: one}, name)
        for path, own in WRONG.items()
        for name in own
        for one in own[name]
    ),
    *TOGETHER,
]


@pytest.mark.parametrize(
    "path, change, param", ROWS, ids=[f"{path}-{change}"[:60] for path, change, _ in ROWS]
)
def test_bad_input_is_an_openai_error_of_one_sentence(
    path: str, change: Any, param: str | None, servers: dict[str, Any]
) -> None:
    server = servers["tools" if path == RESPONSES else "plain"]
    said = check_refused(server, path, change, param)
    assert path != COMPLETIONS or f"{param!r} is required" not in said  # it is there
    assert change != {"prompt": []} or "give a text, token ids" in said


HALF = "\ud83d"
NESTED: Any = {"a": [{"b": HALF}]}


def with_call(**change: Any) -> Any:
    function = {"name": "time", "arguments": "{}"} | change
    call = {"id": "c1", "type": "function", "function": function}
    return [*CHAT, {"role": "assistant", "tool_calls": [call]}]


def function(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "t", "parameters": parameters}}]


@pytest.mark.parametrize("path, change, param", [
    (CHATS, {"messages": with_call(arguments='{"q": "\\ud83d"}')}, "messages"),
    (CHATS, {"messages": with_call(arguments='{"q": [{"\\ude00": 1}]}')}, "messages"),
    (CHATS, {"messages": with_call(name=HALF)}, "messages"),
    (CHATS, {"tools": function(NESTED)}, "tools"),
    (CHATS, {"chat_template_kwargs": NESTED}, "chat_template_kwargs"),
    (CHATS, {"chat_template_kwargs": {HALF: 1}}, "chat_template_kwargs"),
    (CHATS, {"metadata": NESTED}, "metadata"),
    (CHATS, {"metadata": {"a": float("nan")}}, "metadata"),
    (CHATS, {"structured_outputs": {"json": '{"const": "\\ud83d"}'}}, "structured_outputs"),
    (CHATS, {"structured_outputs": {"json": HALF}}, "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"json": {"const": HALF}}}, "structured_outputs"),
    (COMPLETIONS, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NESTED}}}, "response_format"),
    (COMPLETIONS, {"metadata": {"a": float("inf")}}, "metadata"),
    (COMPLETIONS, {"logit_bias": {HALF: 1}}, "logit_bias"),
    (COMPLETIONS, {HALF: 1}, None),
    ("/tokenize", {"messages": with_call(arguments='{"q": "\\ud83d"}')}, "messages"),
    ("/tokenize", {"messages": CHAT, "tools": function(NESTED)}, "tools"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "time", "arguments": '{"q": "\\ud83d"}'}]}, "input"),
    (RESPONSES, {"metadata": NESTED}, "metadata"),
    (RESPONSES, {"tools": [{"type": "function", "name": "t", "parameters": NESTED}]}, "tools"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": NESTED}}}, "text"),
])  # fmt: skip
def test_what_is_no_text_is_refused_wherever_it_stands(
    path: str, change: dict, param: str | None, servers: dict[str, Any]
) -> None:
    for more in ({},) if path == "/tokenize" else ({"stream": False}, {"stream": True}):
        check_refused(servers["tools"], path, change, param, **more)


def test_arguments_that_json_cannot_write_stay_a_text(servers: dict[str, Any]) -> None:
    for number in ("1e999", "NaN", "-Infinity"):
        messages = with_call(name="weather", arguments=f'{{"unit": {number}}}')
        told = servers["tools"].http.post("/tokenize", json={"messages": messages})
        assert told.status_code == 200


@pytest.mark.parametrize("content, headers", [
    (b"{bad", JSON), (b"{bad", {}), (b"[1]", JSON), (b"", JSON), (b"\xff\xfe", JSON),
])  # fmt: skip
def test_what_is_no_json_object_is_refused(
    content: bytes, headers: dict, servers: dict[str, Any]
) -> None:
    response = servers["plain"].http.post(COMPLETIONS, content=content, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_other_models_and_paths_are_not_found(servers: dict[str, Any]) -> None:
    http = servers["plain"].http
    missing = http.post(COMPLETIONS, json={"model": "other", "prompt": "x"})
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    assert http.post("/tokenize", json={"model": "other", "prompt": "x"}).status_code == 404
    for response in (http.get("/v1/nothing"), http.get(COMPLETIONS)):
        assert response.status_code in (404, 405) and response.json()["error"]["message"]
    assert response.headers["allow"] == "POST"
