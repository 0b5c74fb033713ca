"""Masks of chats that hold their answers: exactly what the target would have written,
or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate import prompts
from draftsmith.distill.generate.chat_mask import masked_chat
from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.errors import UserError

HEAD = "{% for message in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = HEAD + "<{{ message.role }}>{{ message.content }}\n" + TAIL
CLOSED = HEAD + "<{{ message.role }}>{{ message.content | trim }}<|endoftext|>\n" + TAIL
MARKED = (
    HEAD
    + "{% if message.role == 'assistant' %}<assistant>{% generation %}{{ message.content }}<|endoftext|>{% endgeneration %}\n"
    + "{% else %}<{{ message.role }}>{{ message.content }}\n{% endif %}"
    + TAIL
)
# What reasoning models do: only the last answer is rendered whole.
FORGETFUL = (
    HEAD
    + "<{{ message.role }}>{% if loop.last and message.role == 'assistant' %}<think></think>{% endif %}{{ message.content }}\n"
    + TAIL
)
TURNS = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Who verifies?"},
    {"role": "assistant", "content": "The target verifies what the draft proposes."},
    {"role": "user", "content": "And who learns?"},
    {"role": "assistant", "content": "The draft."},
]


@pytest.fixture
def tokenizer(tiny_target) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_target("llama"), trust_remote_code=False)


def written(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, template: str
) -> list[str]:
    """The text of each masked stretch."""
    tokenizer.chat_template = template
    masked = masked_chat(messages, tokenizer, (0,), where="row 1")
    assert masked.ids == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    stretches: list[list[int]] = []
    for at, (token, bit) in enumerate(zip(masked.ids, masked.mask, strict=True)):
        if bit and (at == 0 or not masked.mask[at - 1]):
            stretches.append([])
        if bit:
            stretches[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize(
    ("template", "end"), [(PLAIN, ""), (CLOSED, "<|endoftext|>"), (MARKED, "<|endoftext|>")]
)
def test_every_answer_is_masked_and_nothing_else(tokenizer, template, end):
    expected = [turn["content"] + end for turn in TURNS if turn["role"] == "assistant"]
    assert written(TURNS, tokenizer, template) == expected


def test_what_the_template_trims_and_adds_is_not_the_answer(tokenizer):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "\n  import os  \n\n"},
    ]
    assert written(chat, tokenizer, CLOSED) == ["import os<|endoftext|>"]
    # Without an end of text the space behind an answer may be the template's own.
    assert written(chat, tokenizer, PLAIN) == ["\n  import os"]


WORDS = st.lists(
    st.sampled_from(["the", "draft", " ", "\n", "<user>", "e", "\u00e9", ".", "in"]),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(WORDS.map("".join).filter(str.strip), min_size=2, max_size=6))
def test_masked_tokens_are_those_that_a_server_would_have_added(tiny_target, contents):
    """In front of each answer stand the tokens of the prompt that a server would have read, but for
    one on both sides."""
    tokenizer = load_tokenizer(tiny_target("llama"), trust_remote_code=False)
    tokenizer.chat_template = CLOSED
    messages = [
        {"role": "assistant" if at % 2 else "user", "content": text}
        for at, text in enumerate(contents)
    ]
    masked = masked_chat(messages, tokenizer, (0,), where="row 1")
    begins = [at for at, bit in enumerate(masked.mask) if bit and not masked.mask[at - 1]]
    turns = [at for at, turn in enumerate(messages) if turn["role"] == "assistant"]
    assert len(begins) == len(turns)
    for begin, turn in zip(begins, turns, strict=True):
        prompt = tokenizer.apply_chat_template(
            messages[:turn], tokenize=True, return_dict=False, add_generation_prompt=True
        )
        assert masked.ids[:begin] == prompt
        answer = tokenizer.decode(masked.ids[begin : begin + masked.mask[begin:].index(0)])
        assert answer == messages[turn]["content"].strip() + "<|endoftext|>"


def test_a_template_that_forgets_is_refused_for_turns_in_between_only(tokenizer):
    with pytest.raises(UserError, match=r"row 1: the chat template renders turn 3 otherwise"):
        written(TURNS, tokenizer, FORGETFUL)
    assert written(TURNS[:3], tokenizer, FORGETFUL) == ["<think></think>" + TURNS[2]["content"]]


def test_chats_that_cannot_be_masked_are_named(tokenizer):
    with pytest.raises(UserError, match="row 1 has no assistant turn"):
        written(TURNS[:2], tokenizer, PLAIN)
    with pytest.raises(UserError, match="empty mask"):
        written(
            TURNS,
            tokenizer,
            HEAD
            + "{% if message.role != 'assistant' %}<{{ message.content }}{% endif %}{% endfor %}",
        )
    with pytest.raises(UserError, match="cannot be rendered"):
        written(TURNS, tokenizer, "{{ raise_exception('no system role') }}")


def kept(
    path: Path, tokenizer: PreTrainedTokenizerBase, rows: list[dict], **options: Any
) -> list[prompts.Prompt]:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    config = GenerateOptions(target="t", prompts=str(path), out="o", keep_answers=True, **options)
    return prompts.load(config, tokenizer, eos_token_ids=(0,))


def test_chats_completions_and_plain_text_keep_their_answers(tmp_path, tokenizer):
    rows = [
        {"messages": TURNS},
        {"prompt": "The draft ", "completion": "proposes."},
        {"text": "import os"},
    ]
    chat, completed, plain = kept(tmp_path / "a.jsonl", tokenizer, rows, chat="never")
    assert sum(chat.mask) > 5 and len(chat.mask) == len(chat.ids)
    prompt = tokenizer.encode("The draft ")
    assert completed.ids[: len(prompt)] == prompt and completed.mask == [0] * len(prompt) + [1] * (
        len(completed.ids) - len(prompt)
    )
    assert tokenizer.decode(completed.ids) == "The draft proposes."
    assert plain.ids == tokenizer.encode("import os") and plain.mask == [0] + [1] * (
        len(plain.ids) - 1
    )


def test_a_prompt_without_an_answer_has_none_to_keep(tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"line 1 of .* holds no answer"):
        kept(tmp_path / "a.jsonl", tokenizer, [{"prompt": "x"}])


def test_the_target_answers_the_last_question_of_a_chat_that_was_answered(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURNS}))
    config = GenerateOptions(target="t", prompts=str(tmp_path / "a.jsonl"), out="o")
    (prompt,) = prompts.load(config, tokenizer)
    assert tokenizer.decode(prompt.ids).endswith("<user>And who learns?\n<assistant>")
