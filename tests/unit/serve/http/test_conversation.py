"""Requests of the Responses API as chat requests, and answers as its items and events."""

from __future__ import annotations

from typing import Any

from draftsmith.serve.http.responses_api import OutputItems
from draftsmith.serve.http.responses_body import ResponsesRequest, chat_request, messages_of
from draftsmith.serve.tools.call_format import AnswerPiece, CallPiece

CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "How warm?"} | fields)


def test_items_of_one_answer_are_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How warm?"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"role": "assistant", "content": "I look."},
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": "21"},
        {"role": "assistant", "content": "21 degrees"},
        {"role": "assistant", "content": "Anything else?"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert messages_of(request(input=items, instructions="Say.")) == [
        {"role": "system", "content": "Say."},
        {"role": "user", "content": "How warm?"},
        {
            "role": "assistant",
            "reasoning_content": "Look.",
            "content": "I look.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
        {"role": "assistant", "content": "21 degrees"},
        {"role": "assistant", "content": "Anything else?"},
    ]


def test_parameters_have_their_chat_names() -> None:
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "null"}}
    asked = request(
        max_output_tokens=5,
        tools=[tool],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": schema},
    )
    chat = chat_request(asked)
    assert chat.max_completion_tokens == 5
    assert [one.function.name for one in chat.tools or ()] == ["weather"]
    (only,) = chat.choice().tools
    assert only.name == "weather" and chat.choice().forced
    assert chat.format_name() == "response_format" and chat.answer_grammar() is not None


def test_an_answer_is_items_that_end_before_the_next_begin() -> None:
    output = OutputItems(lambda: "c1")
    events = output.push(AnswerPiece(reasoning="Look.")) + output.push(AnswerPiece(content="I "))
    events += output.push(AnswerPiece(content="look."))
    events += output.push(AnswerPiece(calls=(CallPiece(0, "weather", '{"unit"'),)))
    events += output.push(AnswerPiece(calls=(CallPiece(0, None, ': "C"}'),)))
    events += output.finish(whole=False)
    reasoning, message, call = output.items
    assert reasoning["content"][0]["text"] == "Look." and reasoning["status"] == "completed"
    assert message["content"][0]["text"] == "I look." and message["status"] == "completed"
    assert (call["arguments"], call["call_id"]) == ('{"unit": "C"}', "c1")
    assert call["status"] == "incomplete"
    text = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert text == ["I ", "look."]
    ends = [event["type"].endswith("item.done") for event in events]
    begins = [event["type"].endswith("item.added") for event in events]
    assert [sum(ends[:place]) for place, begun in enumerate(begins) if begun] == [0, 1, 2]


def test_an_answer_without_anything_is_an_empty_message() -> None:
    output = OutputItems(lambda: "c1")
    events = output.finish(whole=True)
    (message,) = output.items
    assert message["type"] == "message" and message["content"][0]["text"] == ""
    assert events[0]["type"] == "response.output_item.added"
    assert events[-1]["item"]["status"] == "completed"
