"""Prompts from every source, in a fixed order, split by document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate import prompts
from draftsmith.errors import UserError


class Letters:
    """A tokenizer of characters."""

    eos_token_id, bos_token_id = 0, None
    added_tokens_decoder = (0,)

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        turns = json.dumps(options["tools"]) if options.get("tools") else ""
        turns += "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation)
        return turns + "<assistant>" * options.get("add_generation_prompt", False)


def load(source: object, *, template: str | None = None, **options: Any) -> list[prompts.Prompt]:
    config = GenerateOptions(target="t", prompts=str(source), out="o", **options)
    return prompts.load(config, Letters(template))


def text(prompt: prompts.Prompt) -> str:
    return "".join(map(chr, prompt.ids))


def test_lines_of_a_text_file_and_rows_of_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n  \ntwo\n")
    rows = [{"prompt": "one", "id": 3}, {"messages": [{"role": "user", "content": "hi"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert [text(prompt) for prompt in load(tmp_path / "a.txt")] == ["one", "two"]
    assert [text(prompt) for prompt in load(tmp_path / "a.jsonl", template="x", chat="never")] == [
        "one",
        "<user>hi<assistant>",
    ]
    assert text(load(tmp_path / "a.jsonl", template="x")[0]) == "<user>one<assistant>"
    assert text(load(tmp_path / "a.txt", count=1)[0]) == "one"


def test_a_datasets_folder_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "one"}, {"prompt": "two"}]).save_to_disk(
        str(tmp_path / "d")
    )
    assert [text(prompt) for prompt in load(tmp_path / "d")] == ["one", "two"]


def test_windows_of_the_corpus_are_repeatable_and_split_by_document() -> None:
    first = load("stdlib:prose", count=40, prompt_tokens=30)
    assert first == load("stdlib:prose", count=40, prompt_tokens=30)
    assert first != load("stdlib:prose", count=40, prompt_tokens=30, seed=1)
    assert (
        len(first) == 40
        and all(len(prompt.ids) <= 30 for prompt in first)
        and len({prompt.name for prompt in first}) > 10
    )
    held_out = load("stdlib:prose", count=40, split="held-out", held_out=0.3)
    train = load("stdlib:prose", count=40, split="train", held_out=0.3)
    assert all(prompt.held_out for prompt in held_out) and not any(
        prompt.held_out for prompt in train
    )
    assert not {prompt.name for prompt in held_out} & {prompt.name for prompt in train}


def test_a_question_has_one_name_in_every_form(tmp_path: Path) -> None:
    """Chats with answers to train on, and their questions alone, are split alike."""

    def chat(*turns: tuple[str, str]) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    rows = [
        chat(("user", "why")),
        chat(("user", "why"), ("assistant", "so")),
        chat(("user", "why"), ("assistant", "because")),
        {"prompt": "why"},
        chat(("system", "be brief"), ("user", "why")),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = [prompt.name for prompt in load(tmp_path / "a.jsonl", template="x")]
    assert len(set(names[:4])) == 1 and names[4] != names[0]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ', "line 2"),
        ("a.jsonl", '{"text": "x"}', "a text and no prompt"),
        ("a.jsonl", '{"body": "x"}', "body"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "x"}]}', "chat template"),
        ("a.jsonl", '{"messages": ["x"]}', "messages"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "chat template"),
        ("a.jsonl", "", "no prompt"),
        ("a.txt", "\n\n", "no prompt"),
    ],
)
def test_bad_sources_are_named(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=says):
        load(tmp_path / name)


def test_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        load("nowhere.jsonl")


class ThinkingLetters(Letters):
    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        shown = {True: "<on>", False: "<off>", None: ""}[options.pop("enable_thinking", None)]
        return super().apply_chat_template(conversation, **options) + shown


KNOWS = "{% if enable_thinking %}x{% endif %}"


def test_thinking_is_a_variable_of_the_chat_template(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join("abcdefgh"))

    def ends(thinking: str | None, template: str = KNOWS) -> list[str]:
        config = GenerateOptions(
            target="t", prompts=str(tmp_path / "a.txt"), out="o", thinking=thinking
        )
        found = prompts.load(config, ThinkingLetters(template))
        for prompt in found:
            shown = {True: "<on>", False: "<off>", None: "<assistant>"}[prompt.way.thinking]
            assert text(prompt).endswith(shown)
        return [text(prompt).rpartition("<")[2] for prompt in found]

    assert ends(None) == ["assistant>"] * 8
    assert ends("on") == ["on>"] * 8 and ends("off") == ["off>"] * 8
    assert sorted(ends("both")) == ["off>"] * 4 + ["on>"] * 4
    with pytest.raises(UserError, match="target 't' has no enable_thinking; leave it out"):
        ends("on", "{{ enable }} enable_thinking")


@pytest.mark.parametrize("source", ["stdlib:prose", "a.txt"])
def test_thinking_without_a_chat_is_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\nb")
    given = source if source.startswith("stdlib") else str(tmp_path / source)
    with pytest.raises(UserError, match="given without one; leave it out, or give chats"):
        load(given, thinking="on", count=2)


def kept(path: Path, rows: list[dict[str, Any]], **options: Any) -> list[tuple[str, list[int]]]:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found = load(path, keep_answers=True, **options)
    return [(text(prompt), prompt.mask or []) for prompt in found]


CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]


def test_chats_completions_and_plain_text_keep_their_answers(tmp_path: Path) -> None:
    rows = [{"messages": CHAT}, {"prompt": "ab", "completion": "cd"}, {"text": "ef"}]
    chat = ("<user>ab<assistant>cd\0", [0] * 19 + [1] * 3)
    plain = ("ef", [0, 1])
    found = kept(tmp_path / "a.jsonl", rows, template="content", chat="never")
    assert found == [chat, ("abcd\0", [0, 0, 1, 1, 1]), plain]
    # As a chat the completion is the answer of one.
    assert kept(tmp_path / "a.jsonl", rows, template="content") == [chat, chat, plain]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "x"}, "no answer"),
        ({"prompt": "", "completion": "x"}, "an answer to an empty prompt"),
        ({"messages": [CHAT[0] | {"content": ""}, CHAT[1]]}, "an answer to an empty prompt"),
    ],
)
def test_a_prompt_without_an_answer_or_question_has_none_to_keep(
    tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=f"line 1 of .* holds {says}"):
        kept(tmp_path / "a.jsonl", [row], template="content")


@pytest.mark.parametrize("write", [json.dumps, list])
def test_a_null_of_a_tool_is_in_the_prompt_as_it_is_served(tmp_path: Path, write: Any) -> None:
    schema = {"type": "object", "properties": {"unit": {"type": "string", "default": None}}}
    row = {"messages": CHAT[:1], "tools": write([{"name": "f", "parameters": schema}])}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (prompt,) = load(tmp_path / "a.jsonl", template="{{ tools }}")
    assert json.dumps(schema) in text(prompt)


def test_the_target_answers_the_last_question_of_a_chat_that_was_answered(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [*CHAT, *CHAT]}))
    (prompt,) = load(tmp_path / "a.jsonl", template="content")
    assert text(prompt) == "<user>ab<assistant>cd<user>ab<assistant>"


def test_thinking_is_of_kept_answers_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}))

    def prompt_of(thinking: str) -> str:
        config = GenerateOptions(
            target="t",
            prompts=str(tmp_path / "a.jsonl"),
            out="o",
            keep_answers=True,
            thinking=thinking,
        )
        template = KNOWS + "{{ content }}"
        (found,) = prompts.load(config, ClosingLetters(template))
        return text(found).partition("cd")[0]

    assert prompt_of("on").endswith("<on>") and prompt_of("off").endswith("<off>")


class ClosingLetters(ThinkingLetters):
    """Shows the variable before each answer."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        shown = {True: "<on>", False: "<off>", None: ""}[options.get("enable_thinking")]
        turns = "".join(
            f"<{turn['role']}>{shown * (turn['role'] == 'assistant')}{turn['content']}"
            for turn in conversation
        )
        return turns + f"<assistant>{shown}" * options.get("add_generation_prompt", False)
