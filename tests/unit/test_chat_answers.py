"""Texts of conversations that hold their answers: what a server reads, then what the target writes,
up to its end."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from draftsmith.chat_answers import ChatAnswers
from draftsmith.chats import conversation_of, without_nulls
from draftsmith.errors import UserError
from tests.chat_templates import (
    CITY,
    CONVERSATIONS,
    ONE,
    eos_ids,
    faults,
    thought,
    tokenizer_of,
    trained,
    turn,
)

HEAD = "{% for message in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
OFFERED = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
BEGUN = "<|im_start|>{{ message.role }}\n"
PLAIN = (
    HEAD
    + "<{{ message.role }}>{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CLOSED = HEAD + BEGUN + "{{ message.content | trim }}<|im_end|>\n" + TAIL
TOOLS = OFFERED + HEAD + BEGUN + "{{ message.content }}" + CALLS + "<|im_end|>\n" + TAIL
ITEMS = TOOLS.replace(
    "{{ call.function | tojson }}",
    "{% for name, value in call.function.arguments | items %}{{ call.function.name }} {{ name }}={{ value }}{% endfor %}",
)
ADDED = TOOLS.replace(
    "{{ call.function | tojson }}", "{{ call.function.name + call.function.arguments }}"
)
# What ends an answer is the head of the next turn.
NEXT = (
    "[gMASK]"
    + HEAD
    + "{{ {'user': '<|user|>', 'tool': '<|observation|>'}.get(message.role, '<|' + message.role + '|>') }}"
    + "{{ message.content }}"
    + CALLS
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{# <|user|> <|observation|> <|assistant|> <|system|> #}"
    + "{% if tools %}{% endif %}"
)
# Reasoning is kept in the last answer alone.
FORGETFUL = (
    HEAD
    + BEGUN
    + "{% if loop.last and message.role == 'assistant' %}<think>\n{{ message.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    + "{{ message.content.split('</think>')[-1] }}<|im_end|>\n"
    + TAIL
)
# The prompt begins reasoning, and no answer is rendered with it.
OPEN = (
    HEAD
    + BEGUN
    + "{{ message.content.split('</think>')[-1] | trim }}<|im_end|>\n"
    + TAIL.replace("assistant\n", "assistant\n<think>\n")
)
SWITCHED = (
    HEAD
    + BEGUN
    + "{% if message.role == 'assistant' %}<think>{% if message.reasoning_content %}\n{{ message.reasoning_content }}\n{% endif %}</think>{% endif %}"
    + "{{ message.content }}<|im_end|>\n{% endfor %}"
    + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% if enable_thinking is defined and not enable_thinking %}</think>{% else %}{{ '\n' }}{% endif %}{% endif %}"
)
# The system's text stands before the last question, unless an answer follows.
MOVED = (
    HEAD
    + "{% if message.role == 'user' %}[INST]{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ message.content }}[/INST]"
    + "{% elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# The end of a conversation, behind that of the turn.
TWICE = HEAD + "<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
TWICE += "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
PARTS = (
    HEAD
    + BEGUN
    + "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
    + TAIL
)
STRICT = (
    HEAD
    + "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    + CLOSED
)
KINDS = {
    "plain": PLAIN, "closed": CLOSED, "tools": TOOLS, "items": ITEMS, "added": ADDED, "next": NEXT,
    "forgetful": FORGETFUL, "open": OPEN, "switched": SWITCHED, "moved": MOVED, "twice": TWICE,
    "parts": PARTS, "strict": STRICT,
}  # fmt: skip
TAKES_TOOLS = ("tools", "items", "added", "next")


def answers_of(source: str, *, ends: tuple[str, ...] = ()) -> ChatAnswers:
    tokenizer = tokenizer_of(source)
    ids = tokenizer.convert_tokens_to_ids(list(ends)) if ends else eos_ids(source, tokenizer)
    return ChatAnswers(tokenizer, ids)


def split(
    messages: list[dict[str, Any]], source: str, *, ends: tuple[str, ...] = (), **more: Any
) -> list[list[str]]:
    """Each text as its stretches, those of prompts and of answers in turn."""
    form = answers_of(source, ends=ends)
    found = []
    for ids, mask in form.texts(conversation_of({"messages": messages, **more}, "row 1"), "row 1"):
        edges = [at for at in range(1, len(ids)) if mask[at] != mask[at - 1]]
        spans = zip([0, *edges], [*edges, len(ids)])
        found.append([form.tokenizer.decode(ids[begin:end]) for begin, end in spans])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_those_of_a_server_and_answers_have_their_end(
    kind: str, tmp_path: Path
) -> None:
    source = KINDS[kind]
    tokenizer, refused = tokenizer_of(source), {}
    for name, case in CONVERSATIONS.items():
        found = trained(case[0], tokenizer, eos_ids(source, tokenizer), tmp_path)
        if isinstance(found, str):
            refused[name] = found
        else:
            assert faults(found, case, tokenizer, source) == [], (kind, name)
    expected = set() if kind in TAKES_TOOLS else {"tools", "content and calls"}
    if kind == "strict":
        expected |= {
            "system", "multi-turn", "two questions", "two answers", "begins with assistant",
            "system between",
        }  # fmt: skip
    assert set(refused) == expected, refused
    assert all(
        "tools, which have no place" in one or "alternate" in one for one in refused.values()
    )


def test_an_answer_without_reasoning_has_the_form_that_its_prompt_asks_for() -> None:
    ((prompt, answer),) = split(ONE, OPEN)
    assert prompt.endswith("<think>\n") and answer == "\n</think>\n\nIt is BETA.<|im_end|>"
    ((prompt, answer),) = split(ONE, SWITCHED)
    assert prompt.endswith("<think></think>") and answer == "It is BETA.<|im_end|>"
    ((prompt, answer),) = split([ONE[0], thought("BETA")], SWITCHED)
    assert prompt.endswith("<think>\n") and answer.startswith("I know that")
    off = {"enable_thinking": False}
    with pytest.raises(UserError, match=r"row 1, turn 2: .* with reasoning, behind other text"):
        split([ONE[0], thought("BETA")], SWITCHED, chat_template_kwargs=off)


def test_nulls_of_other_rows_are_in_no_prompt() -> None:
    empty = {"city": "BETACITY", "query": None}
    call = {"function": {"name": "weather", "arguments": empty}, "id": None, "type": None}
    chat = [ONE[0], {**turn("assistant", ""), "tool_calls": [call], "name": None}]
    tool = {"name": "weather", "description": None, "parameters": {**CITY, "query": None}}
    form = answers_of(TOOLS)
    row = without_nulls({"messages": chat, "tools": [tool]})
    ((ids, _),) = form.texts(conversation_of(row, "row 1"), "row 1")
    assert "null" not in form.tokenizer.decode(ids)
    assert "query" not in form.tokenizer.decode(ids)


def test_the_end_of_an_answer_is_that_of_its_turn() -> None:
    def end(source: str, *ends: str) -> str:
        form = answers_of(source, ends=ends)
        return form.tokenizer.decode(form.end.tokens)

    gemma = CLOSED.replace("<|im_end|>", "<end_of_turn>")
    # The generation config may name the end of text alone.
    assert end(gemma, "</s>") == end(gemma, "</s>", "<end_of_turn>") == "<end_of_turn>"
    assert end(TWICE, "</s>") == "<|end|>" and end(NEXT, "</s>") == "<|user|>"
    assert end(PLAIN) == "</s>"
    form = answers_of(gemma, ends=("</s>",))
    chat = form.prompt(conversation_of({"messages": ONE[:1]}, "row 1"), "row 1")
    assert form.tokenizer.decode(form.end_behind(chat)) == "<end_of_turn>"
    plain = form.tokenizer.encode("Tell me", add_special_tokens=False)
    assert form.tokenizer.decode(form.end_behind(plain)) == "</s>"


def test_a_completion_without_a_template_ends() -> None:
    form = answers_of(PLAIN)
    prompt = form.tokenizer.encode("Name an animal.", add_special_tokens=False)
    ids, mask = form.completion(prompt, " Quokka.")
    assert form.tokenizer.decode(ids) == "Name an animal. Quokka.</s>"
    assert mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    assert form.completion(prompt, " Quokka.</s>") == (ids, mask)
    assert form.completion([], "ab").mask[0] == 0


def test_a_prompt_keeps_its_tokens_where_the_text_has_others() -> None:
    """Line ends that the answer begins with would be one token with those of the prompt."""
    source = HEAD + "<|im_start|>{{ message.role }}\n\n{{ message.content }}<|im_end|>" + TAIL[:-11]
    source = source.replace("assistant\n", "assistant\n\n") + "{% endif %}"
    form = answers_of(source)
    chat = conversation_of({"messages": ONE}, "row 1")
    prompt = form.prompt(chat._replace(messages=ONE[:1]), "row 1")
    ((ids, mask),) = form.texts(chat, "row 1")
    whole = form.tokenizer.encode(form.tokenizer.decode(ids), add_special_tokens=False)
    assert whole[: len(prompt)] != prompt  # what made the masks of one text differ
    assert ids[: len(prompt)] == prompt and mask == [0] * len(prompt) + [1] * (
        len(ids) - len(prompt)
    )


@pytest.mark.parametrize("said", ["cafe\u0301", "5 \u212b", "\u2126", "\u095c"])
def test_an_answer_that_the_tokenizer_normalises_is_trained(said: str) -> None:
    form = answers_of(CLOSED)
    form.tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    chat = conversation_of({"messages": [ONE[0], turn("assistant", said)]}, "row 1")
    ((ids, mask),) = form.texts(chat, "row 1")
    answer = form.tokenizer.decode([one for one, is_said in zip(ids, mask) if is_said])
    assert answer == unicodedata.normalize("NFC", said) + "<|im_end|>"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('no system role') }}", "messages of row 1 are refused .*no system"),
        ("{{ messages[7].content + 1 }}", "messages of row 1 are refused"),
        (CLOSED.replace("{{ message.content | trim }}", "{% if message.role != 'assistant' %}{{ message.content }}{% endif %}"), "row 1, turn 2: the chat template leaves 'It is BETA.' out"),
        (CLOSED.replace("{{ message.content", "{{ 'x<|im_end|>' + message.content"), "puts 'It is BETA.' behind the end"),
        (TOOLS.replace("message.tool_calls", "(message.tool_calls or [])[:1]"), "leaves 'weather' out"),
    ],
)  # fmt: skip
def test_what_a_template_does_not_render_is_refused_by_a_sentence(source: str, says: str) -> None:
    calls = [{"function": {"name": "weather", "arguments": "{}"}}] * 2
    with pytest.raises(UserError, match=says):
        split([ONE[0], {**ONE[1], "tool_calls": calls}], source)


def test_a_conversation_without_a_prompt_or_an_answer_is_refused() -> None:
    for chat in (ONE[:1], ONE[1:], []):
        with pytest.raises(UserError, match="row 1 has no assistant turn behind a prompt"):
            split(chat, CLOSED)


@pytest.mark.parametrize(
    ("source", "before", "ending", "mark"),
    [
        (CLOSED, "<|im_start|>user\n", "<|im_end|>", ""),
        (NEXT, "[gMASK]<|user|>", "<|assistant|>", ""),
        (PARTS, None, None, None),
        (PLAIN, "<user>", "<assistant>", ""),
        ("[INST] {{ messages[0].content }} [/INST]", "[INST]", "[/INST]", ""),
        ("USER: {{ messages[0].content }} ASSISTANT:", "USER:", None, "ASSISTANT:"),
    ],
)
def test_the_turn_of_a_user_is_where_the_template_puts_the_text(
    source: str, before: str | None, ending: str | None, mark: str | None
) -> None:
    form = answers_of(source)
    place = form.user_turn()
    asking = conversation_of({"messages": [turn("user", "Hello there")]}, "row 1")
    assert form.prompt(asking, "row 1")[: len(place.head)] == place.head
    if before is not None:
        assert form.tokenizer.decode(place.head).rstrip(" ") == before and place.mark == mark
        added = set(place.ends) - set(form.eos)
        assert {form.tokenizer.decode([one]) for one in added} <= {ending}
        assert ending is None or set(form.tokenizer.encode(ending)) <= set(place.ends)


@pytest.mark.parametrize(
    "source",
    [
        None,
        "{{ messages[0].content }}",
        "<|im_start|>{{ messages[0].content }}",
        "{{ messages[0].content }}<|im_end|>",
        "<|im_start|>only this<|im_end|>",
        "{{ raise_exception('Conversation roles must begin with a system message') }}",
    ],
)
def test_a_template_without_a_turn_of_a_user_is_refused(source: str | None) -> None:
    form = answers_of(source or "")
    form.tokenizer.chat_template = source
    with pytest.raises(UserError):
        ChatAnswers(form.tokenizer, form.eos).user_turn()
