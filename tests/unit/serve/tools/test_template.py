"""Formats found in chat templates, and what is refused where there is none."""

from __future__ import annotations

import copy

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.tools.answer import REASONING_FORMATS, THINK
from draftsmith.serve.tools.formats import Hermes, Llama, Mistral
from draftsmith.serve.tools.template import ChatTemplate

QWEN = (
    "{%- if tools %}<tools></tools>{{ '<tool_call>\\n{\"name\": ...}\\n</tool_call>' }}{% endif %}"
)
CODER = QWEN + "<function=f>"
LLAMA = (
    '{% if tools %}{"name": function name, "parameters": dictionary of argument name}{% endif %}'
)
MISTRAL = "{% if tools is not none %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]"


def template(target: Target, source: object, **parsers: str) -> ChatTemplate:
    tokenizer = copy.deepcopy(target.tokenizer())
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer, **parsers)


@pytest.mark.parametrize("source, kind", [
    (QWEN, Hermes), (LLAMA, Llama), ("<|python_tag|>", Llama), (MISTRAL, Mistral), (CODER, None),
    (QWEN + "<arg_key>", None), ("plain", None), (None, None), ({"default": "x", "tool_use": QWEN}, Hermes),
])  # fmt: skip
def test_the_format_of_calls_is_what_the_template_shows(
    target: Target, source: object, kind: type | None
) -> None:
    found = template(target, source)
    assert type(found.calls) is (kind or type(None))
    assert template(target, source, tool_parser="none").calls is None
    assert isinstance(template(target, source, tool_parser="hermes").calls, Hermes)


def test_newer_templates_of_mistral_name_the_arguments(target: Target) -> None:
    old, new = (template(target, source).calls for source in (MISTRAL, MISTRAL + "[ARGS]"))
    assert isinstance(old, Mistral) and isinstance(new, Mistral) and old.arrays and not new.arrays


def test_reasoning_is_what_the_template_shows(target: Target) -> None:
    assert template(target, "{{ x.split('</think>') }}").reasoning == THINK
    assert template(target, "[THINK][/THINK]").reasoning == REASONING_FORMATS["mistral"]
    assert template(target, "plain").reasoning is None
    assert template(target, "</think>", reasoning_parser="none").reasoning is None
    assert template(target, "plain", reasoning_parser="qwen3").reasoning == THINK


def test_tools_without_a_place_are_refused(target: Target) -> None:
    assert isinstance(template(target, QWEN).check_tools(), Hermes)
    with pytest.raises(UserError, match="--tool-call-parser"):
        template(target, CODER).check_tools()
    with pytest.raises(UserError, match="no place in this model's chat template"):
        template(target, "my tools {{ messages }}", tool_parser="hermes").check_tools()
