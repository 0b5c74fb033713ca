"""Targets with another template for their chats."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.drafters.layouts.template import with_template
from draftsmith.drafters.target.load import load_config, load_tokenizer
from draftsmith.errors import UserError

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def target_folder(tiny_target: Callable[..., str]) -> Path:
    return Path(tiny_target("llama"))


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "other.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return path


def test_the_target_is_itself_but_for_its_template(target_folder: Path, template: Path) -> None:
    before = {path: os.stat(path) for path in target_folder.iterdir()}
    folder = with_template(str(target_folder), str(template))
    own, other = (load_tokenizer(path, trust_remote_code=False) for path in (target_folder, folder))
    assert other.apply_chat_template(CHAT, tokenize=False) == "<user>hi"
    assert own.chat_template != TEMPLATE and own.get_vocab() == other.get_vocab()
    configs = [load_config(path, trust_remote_code=False) for path in (target_folder, folder)]
    assert configs[0].to_diff_dict() == configs[1].to_diff_dict()
    assert {path: os.stat(path)[:7] for path in before} == {
        path: stat[:7] for path, stat in before.items()
    }


def test_the_same_files_are_the_same_target(target_folder: Path, template: Path) -> None:
    first = with_template(str(target_folder), str(template))
    (first / "config.json").unlink()  # as a process that was killed leaves it
    assert with_template(str(target_folder), str(template)) == first
    assert (first / "config.json").is_file()
    template.write_text(TEMPLATE + "!", encoding="utf-8")
    assert with_template(str(target_folder), str(template)) != first


def test_a_file_that_is_none_is_a_sentence(target_folder: Path, template: Path) -> None:
    with pytest.raises(UserError, match=r"chat template '.*gone' cannot be read .* file of Jinja"):
        with_template(str(target_folder), str(template.parent / "gone"))
