"""Messages and tools of requests and of rows, in the one form that templates take."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.chats import conversation_of, plain_message, plain_tool, rendered
from draftsmith.errors import UserError
from draftsmith.serve.http.bodies import FunctionTool, MessageBody
from tests.chat_templates import tokenizer_of

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "why"},
    {"role": "tool", "content": "1", "tool_call_id": "a"},
    {"role": "assistant", "content": "c", "reasoning_content": "how"},
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_row_and_a_request_become_the_same_message(message: dict[str, Any]) -> None:
    plain = plain_message(message)
    request = MessageBody.model_validate(message).plain()
    assert json.dumps(plain) == json.dumps(request)  # templates see the order of keys


def test_parts_are_one_text_and_arguments_an_object() -> None:
    assert plain_message(MESSAGES[0])["content"] == "ab"
    called = plain_message(MESSAGES[1])
    assert called["content"] == "" and called["reasoning_content"] == "why"
    assert called["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    ]
    cut = {"name": "f", "arguments": '{"x": '}
    assert plain_message({"role": "assistant", "tool_calls": [cut]})["tool_calls"] == [
        {"type": "function", "function": cut}
    ]


def test_a_bare_function_is_a_tool_as_a_request_has_it() -> None:
    function = {"parameters": {"type": "object"}, "description": "d", "name": "f", "strict": None}
    request = FunctionTool.model_validate({"type": "function", "function": function})
    assert json.dumps(plain_tool(function)) == json.dumps(request.plain())


@pytest.mark.parametrize("given", [
    {"parameters": '{"type": "object"}'}, {"input_schema": {"type": "object"}},
    {"inputSchema": {"type": "object"}, "parameters": None},
])  # fmt: skip
def test_parameters_of_a_tool_have_several_names(given: dict[str, Any]) -> None:
    tool = plain_tool({"name": "f", **given})
    assert tool["function"] == {"name": "f", "parameters": {"type": "object"}}


def test_a_developer_is_the_system_of_a_template_without_one() -> None:
    chat = [{"role": "developer", "content": "a"}]
    shown = "{% for one in messages %}{{ one.role }}:{{ one.content }}{% endfor %}"
    assert rendered(chat, tokenizer_of(shown)) == "system:a"
    assert rendered(chat, tokenizer_of(shown + "{# developer #}")) == "developer:a"


def test_arguments_of_a_call_have_two_names() -> None:
    call = {"name": "f", "parameters": {"city": "Oslo"}}
    (plain,) = plain_message({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert plain["function"] == {"name": "f", "arguments": {"city": "Oslo"}}


@pytest.mark.parametrize(
    ("fields", "source", "variables"),
    [
        ({"reasoning_effort": "high"}, "{{ reasoning_effort }}", {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, "{{ enable_thinking }}", {"enable_thinking": False}),
        ({"verbosity": "low"}, "{{ verbosity }}", {"verbosity": "low"}),
        ({"verbosity": "medium", "reasoning_effort": None}, "", {}),
    ],
)
def test_fields_of_a_request_are_variables_that_its_template_takes(
    fields: dict[str, Any], source: str, variables: dict[str, Any]
) -> None:
    assert conversation_of({"messages": [], **fields}, "row 1", source).variables == variables


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    row = {"messages": [], "tools": [{"name": "f"}], "tool_choice": "none"}
    assert conversation_of(row, "row 1").tools == []


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url'"),
        ({"messages": [{"content": "a"}]}, "KeyError: 'role'"),
        ({"messages": [{"role": "user", "content": 3}]}, "3 as its content, which is no text"),
        ({"messages": [{"role": "tool", "content": {"temp": 20}}]}, "which is no text"),
        ({"messages": [{"role": "user", "content": {"type": "text", "text": "a"}}]}, "no text"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "AttributeError"),
        ({"messages": [], "tools": [{"type": "function"}]}, "KeyError: 'name'"),
        ({"messages": [], "tools": [{"name": "f", "parameters": "x"}]}, "'f' has parameters that"),
        ({"messages": [], "reasoning_effort": "high"}, "reasoning_effort is 'high', which"),
        ({"messages": [], "verbosity": "low"}, "verbosity is 'low', which"),
        ({"messages": [], "chat_template_kwargs": {"tokenize": True}}, "'tokenize' is no variable"),
    ],
)
def test_what_is_no_conversation_is_named(row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"row 1.*{says}"):
        conversation_of(row, "row 1")
