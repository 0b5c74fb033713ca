"""Published shapes of rows, as conversation, prompt or text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.prompts.shapes import normalised

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}  # fmt: skip


def one(value: Any) -> dict[str, Any]:
    (row,) = normalised(value, "row 1 of 'a'")
    return row


def turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * len(texts)
    told = [] if system is None else [{"role": "system", "content": system}]
    return told + [{"role": role, "content": text} for role, text in zip(roles, texts)]


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": text} for speaker, text in pairs]


QA = {"messages": turns("q", "a")}


@pytest.mark.parametrize("row", [
    {"messages": turns("q", "a"), "prompt": "q", "source": 3},
    {"Messages": turns("q", "a")},
    {"messages": json.dumps(turns("q", "a"))},
    {"messages": str(turns("q", "a"))},  # as pandas writes a list into CSV
    {"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}},
    {"messages": said(("human", "q"), ("gpt", "a"))},
    turns("q", "a"),
    {"conversations": said(("human", "q"), ("gpt", "a")), "id": "x"},
    {"conversations": said(("user", "q"), ("chatgpt", "a"))},
    {"conversation": said(("human", "q"), ("assistant", "a"))},
    {"conversations": turns("q", "a")},
    {"conversations": json.dumps(said(("human", "q"), ("gpt", "a")))},
    {"messages": [{"role": "prompter", "content": "q"}, {"role": "Assistant", "content": "a"}]},
    {"conversations": ["q", "a"]},
    {"conversation": [{"input": "q", "output": "a"}]},
    {"prompt": turns("q"), "completion": turns("", "a")[1:]},
    {"prompt": turns("q"), "completion": "a"},
    {"prompt": turns("q"), "answer": 72, "response": "a"},
    {"prompt": turns("q"), "completion": turns("", "a")[1]},
    {"prompt": turns("q")[0], "completion": said(("gpt", "a"))[0]},
    {"prompt": turns("q"), "chosen": turns("", "a")[1:], "rejected": turns("", "b")[1:]},
    {"prompt": turns("q"), "chosen": turns("q", "a")},
    {"prompt": "q", "chosen": turns("q", "a"), "rejected": turns("q", "b")},
    {"prompt": "q", "chosen": turns("", "a")[1:]},
    {"prompt": json.dumps(turns("q")), "completion": json.dumps(turns("", "a")[1:])},
    {"chosen": turns("q", "a"), "rejected": turns("q", "b")},
    {"turns": turns("q", "a")},
    {"prompt": None, "messages": turns("q", "a"), "text": "raw"},
    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": turns("q", "a")}},
])  # fmt: skip
def test_conversations_in_every_shape(row: Any) -> None:
    assert one(row) == QA


@pytest.mark.parametrize("row, prompt, completion", [
    ("q", "q", None),
    ({"prompt": "q"}, "q", None),
    ({"task_id": 0, "prompt": "q", "entry_point": "f"}, "q", None),
    ({"prompt": "q", "completion": "a"}, "q", "a"),
    ({"prompt": "q", "completion": ""}, "q", ""),
    ({"messages": [], "conversations": "", "prompt": "q"}, "q", None),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "q", "a"),
    ({"instruction": "q"}, "q", None),
    ({"instruction": "q", "input": "", "output": "a", "text": "Below is q"}, "q", "a"),
    ({"instruction": "q", "input": "i", "output": "a"}, "q\n\ni", "a"),
    ({"instruction": " ", "input": "q", "output": "a"}, "q", "a"),
    ({"instruction": "q", "context": "c", "response": "a", "category": "x"}, "q\n\nc", "a"),
    ({"question": "q", "answer": "a"}, "q", "a"),
    ({"question": "q", "context": "c", "answers": {"text": ["a"]}}, "c\n\nq", None),
    ({"question": "q", "choices": ["x"], "answer": 0}, "q", None),
    ({"query": "q", "response": "a"}, "q", "a"),
    ({"problem": "q", "solution": "a"}, "q", "a"),
    ({"input": "q", "output": "a"}, "q", "a"),
    ({"question_id": 81, "category": "writing", "turns": ["q", "again"], "reference": ["x"]}, "q", None),
    ({"turns": '["q", "again"]'}, "q", None),
])  # fmt: skip
def test_questions_in_every_shape(row: Any, prompt: str, completion: str | None) -> None:
    assert one(row) == {"prompt": prompt} | (
        {} if completion is None else {"completion": completion}
    )


@pytest.mark.parametrize("answer", [72, True, 0.5, {"value": 72}])
def test_a_prompt_of_turns_is_asked_where_its_answer_is_no_text(answer: Any) -> None:
    assert one({"prompt": turns("q"), "answer": answer}) == {"messages": turns("q")}


def test_a_text_is_one_only_where_nothing_is_asked() -> None:
    assert one({"text": "t", "meta": {}}) == {"text": "t"}


def test_each_instance_of_an_instruction_is_a_row() -> None:
    instances = [{"input": "1", "output": "2"}, {"input": "", "output": "3"}]
    assert list(normalised({"instruction": "q", "instances": instances}, "x")) == [
        {"prompt": "q\n\n1", "completion": "2"},
        {"prompt": "q", "completion": "3"},
    ]


@pytest.mark.parametrize("row", [
    {"system": "s", "instruction": "q3", "output": "a3", "history": [["q", "a"]]},
    {"system_prompt": "s", "conversations": said(("human", "q"), ("gpt", "a"), ("human", "q3"), ("gpt", "a3"))},
    {"conversations": said(("system", "s"), ("human", "q"), ("gpt", "a"), ("human", "q3"), ("gpt", "a3")), "system": "other"},
    {"system": "s", "messages": turns("q", "a", "q3", "a3")},
    {"conversation": [{"system": "s", "input": "q", "output": "a"}, {"input": "q3", "output": "a3"}]},
])  # fmt: skip
def test_what_stands_before_the_question_is_kept(row: Any) -> None:
    assert one(row) == {"messages": turns("q", "a", "q3", "a3", system="s")}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
@pytest.mark.parametrize("variables", [{"enable_thinking": False}, '{"enable_thinking": false}'])
@pytest.mark.parametrize("asked", [
    {"messages": turns("q")}, {"prompt": "q"}, {"prompt": turns("q")}, {"question": "q"},
    {"conversations": said(("human", "q"))},
])  # fmt: skip
@pytest.mark.parametrize("name", ["tools", "functions"])
def test_tools_and_variables_are_kept(asked: Any, name: str, tools: Any, variables: Any) -> None:
    found = one({**asked, name: tools, "chat_template_kwargs": variables})
    assert found == {"messages": turns("q"), "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip


def test_fields_that_steer_the_prompt_are_those_of_a_request() -> None:
    steered = {"reasoning_effort": "high", "verbosity": "low", "tool_choice": "none"}
    body = {"messages": turns("q"), **steered, "tools": [TOOL]}
    assert one({"custom_id": "1", "body": body}) == body
    assert one(body) == {"messages": turns("q"), "tools": [TOOL]}


def test_calls_of_tools_are_kept() -> None:
    call = {"name": "weather", "arguments": {"city": "Oslo"}}
    row = one({
        "conversations": said(("human", "q"), ("function_call", json.dumps(call)), ("observation", "rain"), ("gpt", "a")),
        "tools": json.dumps([TOOL]),
    })  # fmt: skip
    assert row["messages"] == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "a"},
    ]  # fmt: skip
    told = [{"role": "function_call", "content": json.dumps(call)}]
    assert one({"messages": told}) == {"messages": row["messages"][1:2]}
    whole = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": call}],
            "reasoning_content": "r",
        }
    ]
    assert one({"messages": whole}) == {"messages": whole}


@pytest.mark.parametrize("said", [
    {"text": "q"}, {"content": None, "text": "q"}, {"value": "q"}, {"parts": [{"text": "q"}]},
])  # fmt: skip
@pytest.mark.parametrize("speaker", ["role", "from"])
def test_what_is_said_is_found_by_its_names(speaker: str, said: dict[str, Any]) -> None:
    (turn,) = one({"messages": [{speaker: "user", **said}]})["messages"]
    assert turn["role"] == "user" and turn["content"] == [*said.values()][-1]


def test_an_empty_conversation_gives_no_row() -> None:
    assert list(normalised({"conversations": [], "id": "x"}, "x")) == []


@pytest.mark.parametrize("row, says", [
    ({"body": "x"}, "holds body (a text);"),
    ({}, "holds nothing;"),
    (3, "holds a number;"),
    (None, "holds nothing;"),
    ({"prompt": {"text": "x"}}, "holds prompt (an object);"),
    ({"prompt": {"0": "x"}, "completion": {"0": "y"}}, "holds prompt (an object), completion (an object);"),
    ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "b"}, "holds chosen (a text), rejected (a text);"),
    ({"messages": ["x", {"role": "user"}]}, "holds a text as turn 1 of `messages`;"),
    ({"messages": [{"role": "user", "body": "q"}]}, "holds no content as turn 1 of `messages`;"),
    ({"messages": [*turns("q"), {"role": "assistant", "content": None}]}, "holds no content as turn 2 of `messages`;"),
    ({"prompt": ["x", "y"]}, "holds a text as turn 1 of `prompt`;"),
    ({"messages": "hello"}, "holds 'hello' where a list"),
    ({"messages": [{"content": "x"}]}, "holds content as turn 1 of `messages`;"),
    ({"conversations": said(("human", "q"), ("narrator", "x"))}, "holds 'narrator' as the speaker of turn 2 of `conversations`;"),
    ({"conversations": [{"from": "gpt", "value": 3}]}, "holds a number as the value of turn 1"),
    ({"conversations": said(("function_call", '"x"'))}, "as the call of turn 1"),
    ({"turns": []}, "holds a list as `turns`;"),
    ({"turns": [3]}, "holds a number as its first turn;"),
    ({"messages": turns("q"), "tools": {"name": "f"}}, "holds an object as `tools`;"),
    ({"messages": turns("q"), "chat_template_kwargs": ["x"]}, "holds a list as `chat_template_kwargs`;"),
    ({"instruction": "q", "history": ["x"]}, "as `history`"),
])  # fmt: skip
def test_a_row_that_is_not_understood_is_refused_with_what_it_holds(row: Any, says: str) -> None:
    with pytest.raises(
        UserError, match=r"^row 1 of 'a' holds .*; give `messages` of role"
    ) as raised:
        list(normalised(row, "row 1 of 'a'"))
    assert says in str(raised.value)
