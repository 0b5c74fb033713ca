"""`draftsmith generate` with drafts: the texts are the target's, and a run is resumed to the same
ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.commands import generate
from draftsmith.commands.generate import GenerateConfig
from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import DraftLmOptions, Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.sampling.params import SamplingParams
from tests.integration import test_generate
from tests.integration.served import enumerated, fit
from tests.integration.test_generate import cut_after, path

__all__ = ["path"]  # the fixture

OPTIONS = {"eagle3": Eagle3Options(), "draft-lm": DraftLmOptions(target_layers=(0, 3))}


@pytest.fixture(scope="module")
def folders(path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of drafts by family."""
    target, root = Target.load(path), tmp_path_factory.mktemp("drafts")
    for family, options in OPTIONS.items():
        drafter = FAMILIES[family].create(options, target, seed=1)
        checkpoint.save(drafter, root / family, target)
    return {family: str(root / family) for family in OPTIONS}


def config(path: str, out: Path, **changes: object) -> GenerateConfig:
    return test_generate.config(path, out, **{"count": 9, **changes})


def texts(folder: Path) -> list[list[int]]:
    return [row["input_ids"] for row in test_generate.rows(folder)]


def test_greedy_answers_are_the_same_with_a_draft_and_go_on_with_any(
    path: str,
    folders: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    greedy = {"temperature": (0.0,), "max_tokens": 24}
    drafted = greedy | {"draft": folders["draft-lm"], "suffix": True}
    generate.run(config(path, tmp_path / "plain", **greedy))
    assert "tau" not in capsys.readouterr().out
    generate.run(config(path, tmp_path / "drafted", **drafted))
    shown = capsys.readouterr().out.splitlines()[-1]
    assert "tokens written at" in shown and float(shown.split("tau ")[1].split()[0]) >= 1
    assert texts(tmp_path / "drafted") == texts(tmp_path / "plain")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        cut_after(5, patched)
        generate.run(config(path, tmp_path / "cut", **drafted))
    generate.run(config(path, tmp_path / "cut", **greedy))
    assert texts(tmp_path / "cut") == texts(tmp_path / "plain")


def test_a_sampled_run_is_resumed_with_its_own_draft_alone(
    path: str, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever shares their batch and wherever the run is cut, answers are the same."""
    drafted = {"draft": folders["eagle3"], "temperature": (0.0, 0.8), "k": 2}
    generate.run(config(path, tmp_path / "whole", **drafted))
    generate.run(config(path, tmp_path / "alone", **drafted, batch=1))
    assert texts(tmp_path / "alone") == texts(tmp_path / "whole")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        cut_after(4, patched)
        generate.run(config(path, tmp_path / "cut", **drafted))
    recorded = json.loads((tmp_path / "cut" / "provenance.json").read_text())["drafts"]
    assert recorded["draft"] == folders["eagle3"] and recorded["k"] == 2
    other = {"draft": folders["draft-lm"]}
    for change in (other, {"k": 3}, {"draft": None, "k": None}):
        with pytest.raises(UserError, match="was started with drafts"):
            generate.run(config(path, tmp_path / "cut", **drafted | change))
    generate.run(config(path, tmp_path / "cut", **drafted))
    assert texts(tmp_path / "cut") == texts(tmp_path / "whole")


def test_sampled_answers_with_a_draft_have_the_targets_distribution(
    path: str, folders: dict[str, str], tmp_path: Path
) -> None:
    """Three tokens of many equal prompts against their joint distribution, and a wrong one that is
    rejected."""
    count = 600
    (tmp_path / "p.txt").write_text("The target\n" * count)
    changes = {"prompts": str(tmp_path / "p.txt"), "count": count, "batch": 64, "top_k": 3}
    drafted = {"draft": folders["draft-lm"], "max_tokens": 3, "chat": "never"}
    generate.run(config(path, tmp_path / "d", **changes, **drafted))
    target = Target.load(path)
    prompt = target.tokenizer().encode("The target")
    drawn = [text[len(prompt) :] for text in texts(tmp_path / "d")]
    joint = enumerated(target, prompt, SamplingParams(temperature=1.0, top_k=3), 3)
    total = sum(chance**2 for chance in joint.values())
    sharper = {text: chance**2 / total for text, chance in joint.items()}
    assert len(drawn) == count and fit(joint, drawn).p_value > 1e-6 > fit(sharper, drawn).p_value
