"""The recipe of a pipeline: settings, and stages in order, each a command with its options.

    settings: {target: Qwen/Qwen3-8B, prompts: null}
    stages:
      - {name: data, command: generate, options: {target: "${target}", prompts: "${prompts}"}}

A setting without a value is one that a user must give.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.config import build, merge, option, parse_override, read_yaml, unknown_key
from draftsmith.errors import UserError

NAME = re.compile(r"[a-z][a-z0-9_]*")
# Files and folders beside the results of stages.
RESERVED = ("logs", "replaced", "run", "report")


@dataclass(frozen=True, kw_only=True)
class RecipeStage:
    name: str = option(help="name of the stage, and of its result for later ones")
    command: str = option(help="a command of draftsmith")
    recipe: str | None = option(
        None, "a recipe of that command, from the pipeline's folder, under `options`"
    )
    launch: str | None = option(
        None, "a launcher such as torchrun --nproc_per_node 8, in place of one process"
    )
    options: dict = option(factory=dict, help="options of the command, as in its recipes")


@dataclass(frozen=True)
class Recipe:
    path: Path
    settings: dict[str, Any]
    stages: tuple[RecipeStage, ...]


def read_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe at `path` with the `key=value` of `--set`; a UserError names what is wrong."""
    values = read_yaml(path)
    for key in values:
        if key not in ("settings", "stages"):
            raise UserError(f"recipe {str(path)!r}: {unknown_key(key, ['settings', 'stages'])}")
    settings, listed = values.get("settings") or {}, values.get("stages") or []
    if not isinstance(settings, dict) or not isinstance(listed, list) or not listed:
        raise UserError(
            f"recipe {str(path)!r} has no list of stages; it needs a mapping 'settings' and a list "
            "'stages', each with name, command and options"
        )
    stages = [_stage(one, number) for number, one in enumerate(listed, start=1)]
    _check_names([*settings, *(stage.name for stage in stages)])
    stages = [_with_own_recipe(stage, Path(path).parent) for stage in stages]
    for change in changes:
        settings, stages = _changed(settings, stages, change)
    return Recipe(Path(path), settings, tuple(stages))


def _stage(values: Any, number: int) -> RecipeStage:
    if not isinstance(values, dict):
        raise UserError(
            f"stage {number} is {values!r}; it must be a mapping of name, command and options"
        )
    try:
        return build(RecipeStage, values)
    except UserError as error:
        raise UserError(f"stage {values.get('name', number)!r}: {error}") from error


def _check_names(names: Sequence[str]) -> None:
    for at, name in enumerate(names):
        if not NAME.fullmatch(str(name)) or name in RESERVED:
            raise UserError(
                f"{name!r} cannot name a setting or stage; use lower-case letters, digits and _, "
                f"and not {', '.join(RESERVED)}"
            )
        if name in names[:at]:
            raise UserError(f"{name!r} names two settings or stages; rename one of them")


def _with_own_recipe(stage: RecipeStage, folder: Path) -> RecipeStage:
    """The stage with the options of the command's recipe under its own."""
    if stage.recipe is None:
        return stage
    try:
        options = merge(read_yaml(folder / stage.recipe), stage.options)
    except UserError as error:
        raise UserError(f"stage {stage.name!r}: {error}") from error
    return _with_options(stage, options)


def _with_options(stage: RecipeStage, options: dict[str, Any]) -> RecipeStage:
    return RecipeStage(name=stage.name, command=stage.command, launch=stage.launch, options=options)


def _changed(
    settings: dict[str, Any], stages: list[RecipeStage], change: str
) -> tuple[dict[str, Any], list[RecipeStage]]:
    ((name, value),) = parse_override(change).items()
    if name in settings:
        return settings | {name: value}, stages
    names = [stage.name for stage in stages]
    if name not in names:
        problem = unknown_key(name, [*settings, *names]).replace("option", "setting or stage")
        raise UserError(f"--set {change}: {problem}")
    if not isinstance(value, dict):
        raise UserError(f"--set {change} names a stage; write {name}.OPTION=VALUE")
    return settings, [
        _with_options(one, merge(one.options, value)) if one.name == name else one for one in stages
    ]
