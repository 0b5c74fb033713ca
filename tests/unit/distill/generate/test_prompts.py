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

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, conversation: Any, **options: Any) -> list[int]:
        assert options["add_generation_prompt"] and options["tokenize"]
        return self.encode(
            "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"
        )


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


def test_equal_prompts_fall_into_one_part(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(["same", "other"] * 8))
    sides: dict[str, set[bool]] = {}
    for prompt in load(tmp_path / "a.txt", held_out=0.5):
        sides.setdefault(text(prompt), set()).add(prompt.held_out)
    assert all(len(side) == 1 for side in sides.values())


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
    def get_chat_template(self) -> str:
        return self.chat_template or ""

    def apply_chat_template(self, conversation: Any, **options: Any) -> list[int]:
        shown = {True: "<on>", False: "<off>", None: ""}[options.pop("enable_thinking", None)]
        return super().apply_chat_template(conversation, **options) + self.encode(shown)


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
