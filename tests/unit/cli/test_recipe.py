"""`draftsmith config`: the printed recipe is read back, and changes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from draftsmith import config as configuration
from draftsmith.cli import main
from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.commands.recipe import recipe_of
from draftsmith.commands.table import COMMANDS, load


def needed(cls: type) -> list[str]:
    """Words that give what has no default."""
    words = []
    for field in filter(configuration._required, dataclasses.fields(cls)):
        value = (field.metadata["choices"] or ("x",))[0]
        is_positional = field.metadata["positional"]
        words += [value] if is_positional else [f"--{field.name.replace('_', '-')}", value]
    return words


def built(name: str, *words: str) -> Any:
    cls = load(COMMANDS[name].config)
    given = parse(parser_for(name, cls), [*needed(cls), *words])
    return configuration.build(cls, collect(cls, given))


# Those without options take no recipe.
@pytest.mark.parametrize("name", [one for one in COMMANDS if one[:3] not in ("con", "com", "col")])
def test_the_recipe_of_a_command_is_its_defaults(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", name]) == 0
    text = capsys.readouterr().out
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    cls = load(COMMANDS[name].config)
    assert built(name, str(recipe)) == built(name)
    fields = dataclasses.fields(cls)
    given = {one.name for one in fields if not configuration._required(one)}
    off = {one for one in ("draft",) if name == "train"}
    assert configuration.read_yaml(recipe).keys() == given - off
    keys = configuration.dotted_names(cls)
    assert all(f"{key.rpartition('.')[2]}:" in text for key in keys)


def test_a_section_that_is_off_is_a_comment_that_can_be_taken_in(tmp_path: Path) -> None:
    assert main(["config", "nothing"]) == 2
    text = "\n".join(_uncommented("train", "draft"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    assert built("train").draft is None
    assert built("train", str(recipe)).draft is not None
    assert built("train", str(recipe), "draft.num_heads=3").draft.num_heads == 3


def _uncommented(name: str, section: str) -> list[str]:
    lines = recipe_of(name).split("\n")
    begin = lines.index(f"# {section}:")
    end = next(n for n in range(begin + 1, len(lines)) if not lines[n].startswith("#   "))
    return [line.removeprefix("# ") for line in lines[begin:end]]


def test_the_target_of_a_draft_is_found_beside_a_whole_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "bench"]) == 0
    (tmp_path / "recipe.yaml").write_text(capsys.readouterr().out)
    (tmp_path / "draftsmith.json").write_text('{"target": {"name": "org/model"}}')
    words = (str(tmp_path / "recipe.yaml"), "--draft", str(tmp_path))
    assert built("bench", *words).target == "org/model"
