"""Targets with another template for their chats."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.drafters.layouts.template import with_template
from draftsmith.drafters.target.load import load_config, load_tokenizer
from draftsmith.errors import UserError


def test_a_target_with_another_template_is_itself_in_all_else(
    tiny_target: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own, template = Path(tiny_target("llama")), tmp_path / "other.jinja"
    template.write_text("{{ messages[0].role }}!", encoding="utf-8")
    before = {path: os.stat(path)[:7] for path in own.iterdir()}
    folder = with_template(str(own), str(template))
    assert before == {path: os.stat(path)[:7] for path in own.iterdir()}
    old, new = (load_tokenizer(path, trust_remote_code=False) for path in (own, folder))
    assert new.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "user!"
    assert old.chat_template != new.chat_template and old.get_vocab() == new.get_vocab()
    configs = [load_config(path, trust_remote_code=False) for path in (own, folder)]
    assert configs[0].to_diff_dict() == configs[1].to_diff_dict()
    (folder / "config.json").unlink()  # as a process that was killed leaves it
    assert with_template(str(own), str(template)) == folder and (folder / "config.json").is_file()
    template.write_text("another", encoding="utf-8")
    assert with_template(str(own), str(template)) != folder
    template.write_bytes(b"\xff")
    for path in (template, tmp_path / "gone", tmp_path):
        with pytest.raises(UserError, match=r"chat template '.*' cannot be read .* file of Jinja"):
            with_template(str(own), str(path))
