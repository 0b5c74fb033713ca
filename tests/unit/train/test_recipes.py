"""Every shipped recipe is read by the command it is for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from draftsmith.config import build, merge, read_yaml
from draftsmith.drafters.target.device import placement_of
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.train import resolve
from draftsmith.train.config import TrainConfig, UnrollConfig
from draftsmith.train.session import training_arguments

RECIPES = Path(__file__).parents[3] / "recipes"
FAMILIES = ("draft-lm", "eagle3", "p-eagle", "mtp", "eagle1", "medusa", "mlp", "dflash", "dspark")


def family_of(recipe: Path) -> str:
    return next(family for family in FAMILIES if recipe.stem.startswith(family))


def config_of(recipe: Path, **changes: object) -> TrainConfig:
    required = {"family": family_of(recipe), "target": "t", "data": "d", "out": "o"}
    return build(TrainConfig, merge(read_yaml(recipe), required | changes))


def test_there_is_a_recipe_for_every_family_which_the_package_brings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {family_of(recipe) for recipe in RECIPES.glob("*.yaml")} == set(FAMILIES)
    for recipe in RECIPES.glob("*.yaml"):
        assert read_yaml(f"recipes/{recipe.name}") == read_yaml(recipe)
    assert resolve.zero_stage("recipes/zero2.json") == 2


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda recipe: recipe.stem)
def test_recipe_is_read_and_resolved(recipe, tmp_path):
    config = config_of(recipe)
    resolve.check(config)
    assert config != TrainConfig(family=config.family, target="t", data="d", out="o"), (
        "it changes nothing"
    )
    arguments = training_arguments(config, placement_of("float32"), folder=tmp_path, max_steps=10)
    assert arguments.learning_rate == config.optim.lr


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_recipes_leave_the_numbers_to_the_command_line(stage):
    path = RECIPES / f"zero{stage}.json"
    assert resolve.zero_stage(str(path)) == stage
    config = resolve.deepspeed_config(str(path))
    assert config["optimizer"]["params"]["torch_adam"] is True
    assert config["train_micro_batch_size_per_gpu"] == config["gradient_clipping"] == "auto"
    assert config["gradient_accumulation_steps"] == "auto"


def test_a_deepspeed_file_without_zero_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"optimizer": {}}')
    with pytest.raises(UserError, match="zero_optimization"):
        resolve.deepspeed_config(str(tmp_path / "a.json"))
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        resolve.deepspeed_config(str(tmp_path / "b.json"))


def test_options_that_may_change_between_a_run_and_its_continuation_exist():
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    names |= {f"unroll.{field.name}" for field in dataclasses.fields(UnrollConfig)}
    assert names >= resolve.CONTINUABLE
    assert read_json(RECIPES / "zero1.json")["zero_optimization"]["stage"] == 1
