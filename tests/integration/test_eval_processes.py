"""An evaluation whose target is spread over two processes has the figures of one process."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from draftsmith.drafters.checkpoint import save
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.config import EvalConfig
from draftsmith.train.evaluate.start import run
from tests.forked import Forked, Ranks, cli, finish, one_thread


@pytest.fixture
def words(target_folder: str, tmp_path: Path) -> list[str]:
    """`eval` of an untrained EAGLE-3 on the target's greedy answers; those at T = 1 are new."""
    folder = target_folder
    target = Target.load(folder, dtype="float32")
    save(FAMILIES["eagle3"].create(Eagle3Options(), target, seed=0), tmp_path / "draft", target)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{n}(a):"}) + "\n" for n in range(6)))
    command = cli("generate", "--target", folder, "--prompts", prompts, "--out", tmp_path / "data")
    command += shlex.split("--max-tokens 12 --temperature 0 --dtype float32")
    finish(Forked(command, env=one_thread()))
    command = cli("eval", "--target", folder, "--draft", tmp_path / "draft")
    command += ["--data", str(tmp_path / "data"), "--dtype", "float32"]
    return command + shlex.split("--held-out 1 --k 3 --max-tokens 12 --tree dynamic")


@pytest.mark.long
def test_a_spread_target_gives_the_figures_of_a_whole_one(words: list[str], tmp_path: Path) -> None:
    one, spread = tmp_path / "one.json", tmp_path / "spread.json"
    finish(Forked([*words, "--out", str(one)], env=one_thread()))
    finish(Ranks([*words, "--out", str(spread), "--target-shares", "2"], 2))
    assert json.loads(spread.read_text()) == json.loads(one.read_text())


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EvalConfig(target="t", draft="d", data=("x",), target_shares=2)
    with pytest.raises(UserError, match="'target_shares' is 2 but 1 processes run"):
        run(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="'target_shares' is 1 but 2 processes run"):
        run(EvalConfig(target="t", draft="d", data=("x",)))
