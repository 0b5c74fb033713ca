"""Parts of request bodies: what chat templates and the engine get of messages, tools and formats."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.serve.http.bodies import FormatFields, StructuredOutputs, ToolFields
from draftsmith.serve.sampling.grammar import Grammar

WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object"}, "strict": True},
}


@pytest.mark.parametrize(
    ("given", "names", "forced", "parallel"),
    [
        ({}, ["weather", "clock"], False, True),
        ({"tool_choice": "none"}, [], False, True),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            ["weather", "clock"],
            True,
            False,
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
            ["clock"],
            True,
            False,
        ),
    ],
)
def test_a_choice_names_the_tools_that_may_be_called(
    given: dict[str, Any], names: list[str], forced: bool, parallel: bool
) -> None:
    choice = ToolFields.model_validate({"tools": [WEATHER, CLOCK], **given}).choice()
    assert [tool.name for tool in choice.tools] == names
    assert (choice.forced, choice.parallel) == (forced, parallel)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"json": '{"type": "null"}'}, Grammar.json_schema({"type": "null"})),
        ({"regex": "a+"}, Grammar.regex("a+")),
        ({"choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"grammar": 'start: "a"'}, Grammar.lark('start: "a"')),
        ({"json_object": True}, Grammar.json_object()),
    ],
)
def test_a_format_is_the_grammar_it_names(given: dict[str, Any], grammar: Grammar) -> None:
    assert StructuredOutputs.model_validate(given).to_grammar() == grammar
    fields = FormatFields.model_validate({"structured_outputs": given})
    assert fields.answer_grammar() == grammar and fields.format_name() == "structured_outputs"
