"""`draftsmith plan`: hours and memory of a run from a step that is made, and what to give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.cli import main
from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.config import build
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.train.check import memory, plan
from draftsmith.train.check.memory import parts_of
from draftsmith.train.config import PlanConfig, TrainConfig

Planned = Callable[..., dict[str, Any]]


@pytest.fixture
def planned(tiny_target: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> Planned:
    def run(*words: str, kind: str = "llama") -> dict[str, Any]:
        capsys.readouterr()
        assert main(["plan", "--target", tiny_target(kind), *words, "--json"]) == 0
        said = capsys.readouterr().out
        return json.loads(said[said.index("{") :])

    return run


def test_hours_are_those_of_the_measured_step(
    planned: Planned, tiny_target: Callable[..., str]
) -> None:
    found = planned("--families", "eagle3", "medusa", "--answers", "100", "--tokens", "64")
    assert found["tokens"] == 6400
    target = Target.load(tiny_target("llama"))
    for draft in found["drafts"]:
        family = draft["family"]
        module = FAMILIES[family].create(OPTIONS[family](), target, seed=0)
        trained = sum(one.numel() for one in module.parameters() if one.requires_grad)
        assert draft["parameters"] == trained
        assert draft["hours"] == pytest.approx(6400 / draft["tokens_per_s"] / 3600)
        assert 0 < draft["target_share"] <= 1
        assert draft["memory_bytes"] > 16 * trained
    assert found["refused"] == {}


def test_a_reduced_vocabulary_is_planned_before_there_is_data(
    planned: Planned, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("draft: {draft_vocab_size: 32}\n")
    (reduced,) = planned("--recipe", str(recipe), "--families", "eagle3")["drafts"]
    (whole,) = planned("--families", "eagle3")["drafts"]
    assert reduced["parameters"] < whole["parameters"]


def test_what_is_to_be_given_is_a_command_of_train(planned: Planned, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "family: mtp\nbatch_size: 2\nmax_length: 16\nsteps: 3\nunroll: {steps: 2}\nepochs: 4\n"
        "draft: {intermediate_size: 32}\n"
    )
    (draft,) = (found := planned("--recipe", str(recipe)))["drafts"]
    assert " --steps 3 --epochs 4 " in found["give"][1]
    step_s = 2 * 16 / draft["tokens_per_s"]
    assert draft["hours"] == pytest.approx(3 * step_s / 3600)
    much = plan.Planned(**draft | {"target_share": 0.7})
    *_, last = plan.give(PlanConfig(target="T", recipe=str(recipe)), [much])
    assert last.endswith("to run it once for 4 epochs")
    found = planned("--recipe", str(recipe), "--epochs", "2")
    (draft,) = found["drafts"]
    assert draft["family"] == "mtp"
    generate, train = found["give"][:2]
    words = train.split()[2:]
    config = build(
        TrainConfig, collect(TrainConfig, parse(parser_for("train", TrainConfig), words))
    )
    assert (config.family, config.epochs, config.batch_size) == ("mtp", 2, 2)
    assert config.draft.intermediate_size == 32
    assert generate == f"draftsmith generate {config.target} --prompts PROMPTS --out DATA"
    recipe.write_text("family: mtp\nminutes: 2\nunroll: {steps: 2}\n")
    (draft,) = (found := planned("--recipe", str(recipe)))["drafts"]
    assert draft["hours"] == pytest.approx(2 / 60)
    assert " --minutes 2 " in found["give"][1] and "--epochs" not in found["give"][1]


def test_a_family_that_cannot_be_planned_is_left_out_with_its_reason(
    planned: Planned, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("draft: {num_heads: 3}\nunroll: {steps: 3}\n")
    found = planned("--recipe", str(recipe), "--families", "eagle3", "medusa")
    assert [draft["family"] for draft in found["drafts"]] == ["medusa"]
    assert "option 'draft.num_heads' is none of family 'eagle3'" in found["refused"]["eagle3"]


@pytest.mark.long
def test_memory_is_that_of_an_offloaded_target(
    planned: Planned, tiny_target: Callable[..., str]
) -> None:
    parts = parts_of(Target.load(tiny_target("llama"), dtype=torch.float32).model)
    found = planned("--families", "eagle3", "--target-offload", "disk")
    (draft,) = found["drafts"]
    device = parts.beside + max(parts.layers)
    assert draft["memory_bytes"] == device + 16 * draft["parameters"]
    assert "--target-offload disk" in found["give"][1]


def test_what_makes_a_large_draft_fit_is_told(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda _: 1)
    monkeypatch.setattr(plan, "check_fit", lambda *_, **__: None)
    said = planned("--families", "eagle3")["give"][-1]
    assert said.startswith("training eagle3 is too large: ") and "zero3.json" in said


def test_a_table_for_people(
    tiny_target: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--families", "mlp", "--epochs", "3"]
    assert main(["plan", "--target", tiny_target("llama"), *words]) == 0
    said = capsys.readouterr().out
    assert "| draft" in said and f"draftsmith train mlp {tiny_target('llama')} --data" in said
    assert "activations come on top" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--families", "nope"], "must be one of"),
        (["--recipe", "recipes/suffix.yaml"], "does not exist"),
        (["--recipe", "recipes/medusa-small.yaml", "--families", "eagle3"], "num_heads"),
        (["--data", "nowhere"], "data 'nowhere' is not a folder"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_is_loaded(
    words: list[str], says: str, tiny_target: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.commands.table.loading", None)
    assert main(["plan", "--target", tiny_target("llama"), *words]) == 2
    assert says in capsys.readouterr().err
