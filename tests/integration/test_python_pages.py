"""The Python blocks of the guides run as they are written, one after another, in a folder that holds
what they name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.files import read_json, write_json
from tests.data_folders import rows_of, sampled_from, write_rows

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def run(page: str) -> dict[str, Any]:
    """Names that the blocks leave."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (GUIDES / page).read_text("utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture
def folder(target_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(target_folder, tmp_path / "target")
    config = tmp_path / "target" / "config.json"
    write_json(config, read_json(config) | {"max_position_embeddings": 2048})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_serve_and_chat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target.load("target")
    draft = FAMILIES["eagle3"].create(Eagle3Options(), target, seed=0)
    checkpoint.save(draft, folder / "draft", target)
    names = run("python.md")
    shown = re.findall(r"^    (<Engine .*)$", (GUIDES / "python.md").read_text("utf-8"), re.M)
    assert [repr(names["engine"]).replace(", closed", "")] == shown
    assert [message["role"] for message in names["messages"]] == ["user", "assistant", "user"]
    assert names["messages"][1]["content"] and " length 1." in capsys.readouterr().out


@pytest.mark.long
def test_train_and_learn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target.load("target")
    prompts = [[3 + number % 40, 5, 7 + number] for number in range(40)]
    answers = target.answer(prompts, max_new_tokens=20, ignore_eos=True, temperature=1.0)
    write_rows(folder / "data", rows_of(prompts, answers, held_out=range(3)), sampled_from(target))
    names = run("python-train.md")
    trained, learned = names["trained"], names["learned"]
    assert set(trained.tau) == {0.0, 1.0} and min(trained.tau.values()) >= 1
    assert trained.steps == 20 and trained.curves.is_file() and trained.metrics.is_file()
    assert "step 20:" in capsys.readouterr().out
    assert learned.updates >= 1 and (learned.folder / "model.safetensors").is_file()
