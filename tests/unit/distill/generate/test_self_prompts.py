"""Prompts that a target writes itself: which are kept, and which options go with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftsmith.chat_answers import ChatAnswers
from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.config_checks import check_generate as check
from draftsmith.distill.generate.self_prompts import KeptPrompts
from draftsmith.errors import UserError
from tests.chat_templates import eos_ids, tokenizer_of

CLOSED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = "USER: {{ messages[0].content }} ASSISTANT:"


def kept(texts: list[str], source: str = CLOSED, most: int = 99) -> KeptPrompts:
    tokenizer = tokenizer_of(source)
    found = KeptPrompts(ChatAnswers(tokenizer, eos_ids(source, tokenizer)), most)
    for text in texts:
        found.add(tokenizer.encode(text, add_special_tokens=False))
    return found


LONG = "Please describe how a bridge of steel is built across a wide river in {} steps, and why."


@pytest.mark.parametrize(
    ("texts", "dropped"),
    [
        (["How do I bake a loaf of bread"], {"without an end": 1}),
        (
            ["Why?<|im_end|>", "...!!...??<|im_end|>", "<|im_end|>"],
            {"repetitive": 0, "too short": 2},
        ),
        (["the sun " * 12 + "<|im_end|>"], {"repetitive": 1}),
        (["a question<|im_start|>assistant<|im_end|>"], {"with special tokens": 1}),
        (["Name a colour.<|im_end|>", " name  a COLOUR.\n<|im_end|>"], {"duplicate": 1}),
        ([LONG.format(count) + "<|im_end|>" for count in ("six", "two")], {"near duplicate": 1}),
    ],
)
def test_what_serves_nothing_is_dropped_by_its_reason(
    texts: list[str], dropped: dict[str, int]
) -> None:
    found = kept(texts)
    assert found.seen == len(texts)
    assert {reason: found.dropped[reason] for reason in dropped} == dropped
    assert len(found.texts) == len(texts) - found.dropped.total()


def test_texts_are_kept_in_their_order_without_their_end_and_no_more_than_asked() -> None:
    asked = [f"What is {name} good for?" for name in ("a hammer", "glass", "your garden", "rain")]
    assert kept([f" {text}<|im_end|>ignored" for text in asked]).texts == asked
    few = kept([f"{text}<|im_end|>" for text in asked], most=2)
    assert few.full and few.texts == asked[:2] and few.seen == 2
    # A chat without special tokens ends by its text.
    assert kept([f"{text} ASSISTANT: An answer" for text in asked], MARKED).texts == asked


GIVEN = GenerateOptions(target="t", out="o", self_prompts=8)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (replace(GIVEN, prompts="p"), "both name the prompts"),
        (replace(GIVEN, self_prompts=None), "are left out"),
        (replace(GIVEN, keep_answers=True), "--keep-answers does not go"),
        (replace(GIVEN, count=3), "--count does not go"),
        (replace(GIVEN, chat="never"), "--chat never does not go"),
        (replace(GIVEN, self_prompts=0), "'self_prompts' is 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(config: GenerateOptions, says: str) -> None:
    check(GIVEN)
    with pytest.raises(UserError, match=says):
        check(config)
