"""Tokens of answers: the server's, or the tokenizer's where it is sure, else none."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.chat_answers import ChatAnswers
from draftsmith.fleet.observe.endpoints import ENDPOINTS, ObservedAnswer, read_answer
from draftsmith.fleet.observe.rounds import TokenCounter, Unknown, tokens_of
from tests.chat_templates import tokenizer_of

COMPLETIONS, CHAT = ENDPOINTS["/v1/completions"], ENDPOINTS["/v1/chat/completions"]


class Letters:
    """One token a letter, lower case alone; 0 ends a text."""

    chat_template = "{{ messages }}"
    eos_token_id, bos_token_id = 0, None
    added_tokens_decoder = ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(one) for one in text.lower()]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        return "".join(f"<{one['content']}>" for one in conversation)


FORM = ChatAnswers(Letters())


def found(request: dict[str, Any], endpoint: Any = COMPLETIONS, **answer: Any) -> TokenCounter:
    return tokens_of(endpoint, request, ObservedAnswer(finish="length", **answer), FORM)


def test_ids_of_the_server_come_first() -> None:
    given = ObservedAnswer(
        prompt_ids=[4], token_ids=[5, 6], finish="stop", text="zz", completion_tokens=2
    )
    assert tokens_of(COMPLETIONS, {"prompt": "x"}, given, None) == TokenCounter([4], [5, 6])
    assert found({"prompt": [7, 8]}, token_ids=[5]).prompt == [7, 8]
    with pytest.raises(Unknown, match="not all"):
        found({"prompt": [7]}, token_ids=[5], completion_tokens=2)


def test_texts_that_round_trip_are_tokenised() -> None:
    assert found({"prompt": "a"}, text="bc") == TokenCounter([1, 97], [98, 99])
    assert found({"prompt": "a", "add_special_tokens": False}, text="b").prompt == [97]
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    assert found(chat, CHAT, text="b") == TokenCounter(Letters().encode("<hi>")[1:], [98])


def test_the_end_of_a_text_is_counted() -> None:
    def answer(**given: Any) -> list[int]:
        done = ObservedAnswer(finish="stop", text="b", **given)
        return tokens_of(COMPLETIONS, {"prompt": "a"}, done, FORM).answer

    assert answer() == [98, 0]
    assert answer(completion_tokens=2) == [98, 0] and answer(completion_tokens=1) == [98]


@pytest.mark.parametrize(
    ("request_", "given", "reason"),
    [
        ({"prompt": "a"}, {"text": "B"}, "round-trip"),
        ({"prompt": "a"}, {"text": "b", "completion_tokens": 3}, "another length"),
        ({"prompt": "a"}, {"text": "b", "prompt_tokens": 9}, "prompts of another length"),
        ({"prompt": ["a", "b"]}, {"text": "b"}, "several prompts"),
        ({"prompt": "a"}, {"text": "b", "is_text_whole": False}, "in parts"),
        ({"prompt": "a", "stop": ["x"]}, {"text": "b", "finish": "stop"}, "without a count"),
        ({}, {"text": "b"}, "several prompts"),
    ],
)  # fmt: skip
def test_others_are_left_out_by_reason(
    request_: dict[str, Any], given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unknown, match=reason):
        tokens_of(COMPLETIONS, request_, ObservedAnswer(**{"finish": "length", **given}), FORM)


CHATTED = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("field", [
    {"reasoning_effort": "high"}, {"documents": [{"text": "x"}]}, {"chat_template": "x"},
    {"truncate_prompt_tokens": 2}, {"tools": [{"name": "f"}], "tool_choice": "none"}, {"functions": [{"name": "f"}]},
])  # fmt: skip
def test_a_prompt_that_the_server_may_have_made_otherwise_is_left_out(field: Any) -> None:
    with pytest.raises(Unknown, match="prompts"):
        found({**CHATTED, **field}, CHAT, text="b")


def test_ids_that_the_server_cuts_are_no_prompt() -> None:
    cut = {"prompt": [7, 8, 9], "truncate_prompt_tokens": 2}
    for counted in (None, 2):
        with pytest.raises(Unknown, match="prompts"):
            found(cut, text="b", prompt_tokens=counted)
    assert found(cut, text="b", prompt_tokens=3).prompt == [7, 8, 9]


def test_fields_of_a_request_are_in_its_prompt() -> None:
    tokenizer = tokenizer_of("{{ reasoning_effort }}:{% if add_generation_prompt %}go{% endif %}")
    form = ChatAnswers(tokenizer, [tokenizer.eos_token_id])
    asked = {**CHATTED, "reasoning_effort": "high", "add_generation_prompt": None}
    tokens = tokens_of(CHAT, asked, ObservedAnswer(finish="length", text="b"), form)
    assert tokenizer.decode(tokens.prompt) == "high:go"


def test_without_a_tokenizer_there_are_none() -> None:
    with pytest.raises(Unknown, match="no token ids"):
        tokens_of(COMPLETIONS, {"prompt": "a"}, ObservedAnswer(text="b"), None)
    with pytest.raises(Unknown, match="without a template"):
        tokens_of(CHAT, {"messages": 3}, ObservedAnswer(text="b"), FORM)


def test_parsed_parts_of_a_chat_are_not_its_text() -> None:
    data = b'{"choices":[{"message":{"content":"a","tool_calls":[{}]},"finish_reason":"stop"}]}'
    assert not read_answer(CHAT, data, is_stream=False).is_text_whole


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"choices":[{"text":"a"}]}', b'{"choices":[3]}']
)
def test_what_is_no_whole_answer_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_answer(COMPLETIONS, data, is_stream=False)


def test_totals_of_other_servers() -> None:
    data = b'{"choices":[{"text":"a","finish_reason":"stop"}],"timings":{"draft_n":8,"draft_n_accepted":5}}'
    found = read_answer(COMPLETIONS, data, is_stream=False)
    assert (found.drafted, found.accepted, found.report) == (8, 5, {})


def test_a_chats_answer_ends_as_its_template_ends_it() -> None:
    """And not with the end of text, which the server never wrote."""
    turn = "{% for one in messages %}<start_of_turn>{{ one.role }}\n{{ one.content }}<end_of_turn>\n{% endfor %}"
    tokenizer = tokenizer_of(
        turn + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    form = ChatAnswers(tokenizer, [tokenizer.eos_token_id])
    asked = {"messages": [{"role": "user", "content": "Name an animal."}]}
    done = ObservedAnswer(finish="stop", text="Quokka.")
    tokens = tokens_of(CHAT, asked, done, form)
    assert tokenizer.decode(tokens.answer) == "Quokka.<end_of_turn>"
    # A prompt that a client has templated itself.
    ids = {"prompt": tokens.prompt}
    assert tokens_of(COMPLETIONS, ids, done, form).answer == tokens.answer
    plain = tokens_of(COMPLETIONS, {"prompt": "Name an animal."}, done, form)
    assert tokenizer.decode(plain.answer) == "Quokka.</s>"
