"""Recipe of a pipeline, and its stages: names replaced and options checked before the first one
starts."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from draftsmith.client import with_key
from draftsmith.config import (
    SECRET,
    assignments,
    build,
    merge,
    option,
    parse_override,
    read_yaml,
    unknown_key,
)
from draftsmith.errors import UserError

NAME = re.compile(r"[a-z][a-z0-9_]*")
# Files and folders beside the results of stages.
RESERVED = ("logs", "replaced", "run", "report")
# Commands that end by themselves, and the option that names the result of each, which the pipeline
# sets; None: it only prints.
RESULTS = {
    "plan": None, "doctor": None, "generate": "out", "train": "out", "eval": "out", "bench": "out",
    "distill": "versions", "export": "out",
}  # fmt: skip
FILES = ("eval", "bench")  # whose result is a JSON file


class CommandOptions(NamedTuple):
    """Options of one command: their dataclass, and a check that raises a `UserError` for values
    that no run could use; None where none is made of the options alone."""

    config: type
    check: Callable[[Any], object] | None


OptionsOf = Callable[[str], CommandOptions]


@dataclass(frozen=True, kw_only=True)
class RecipeStage:
    name: str = option(help="name of the stage, and of its result for later ones")
    command: str = option(help="a command of draftsmith", choices=tuple(RESULTS))
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


@dataclass(frozen=True)
class Stage:
    """A stage whose names are replaced and whose options are checked."""

    name: str
    command: str
    launch: tuple[str, ...]
    options: dict[str, Any]
    # the same without a result, and `${name}` for those of others, so that a folder may be moved
    recorded: dict[str, Any]
    needs: tuple[str, ...]  # earlier stages whose results it reads
    positional: tuple[str, ...]  # options that the command takes without their names
    result: Path | None

    def words(self) -> list[str]:
        """Arguments of `draftsmith`, without secrets."""
        first = [str(self.options[name]) for name in self.positional if name in self.options]
        left_out = (*self.positional, SECRET)
        named = {name: value for name, value in self.options.items() if name not in left_out}
        return [self.command, *first, *assignments(named)]

    def process(self) -> list[str]:
        first = [program(self.launch[0]), *self.launch[1:]] if self.launch else [sys.executable]
        return [*first, "-m", "draftsmith.cli", *self.words()]

    def environment(self) -> dict[str, str]:
        """Environment of the process, which has the secret."""
        key = self.options.get(SECRET)
        return with_key(None if key is None else str(key))

    def shown(self) -> str:
        launch = [*self.launch, "-m", "draftsmith.cli"] if self.launch else ["draftsmith"]
        return shlex.join([*launch, *self.words()])


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
    stages = [_stage(one, number, Path(path).parent) for number, one in enumerate(listed, start=1)]
    _check_names([*settings, *(stage.name for stage in stages)])
    for change in changes:
        settings, stages = _changed(settings, stages, change)
    return Recipe(Path(path), settings, tuple(stages))


def _stage(values: Any, number: int, folder: Path) -> RecipeStage:
    """A stage with the options of the command's recipe under its own."""
    if not isinstance(values, dict):
        raise UserError(
            f"stage {number} is {values!r}; it must be a mapping of name, command and options"
        )
    try:
        stage = build(RecipeStage, values)
        if stage.recipe is None:
            return stage
        return replace(stage, options=merge(read_yaml(folder / stage.recipe), stage.options))
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
        replace(one, options=merge(one.options, value)) if one.name == name else one
        for one in stages
    ]


def resolve(recipe: Recipe, out: Path, options_of: OptionsOf) -> list[Stage]:
    """Every stage of the recipe, checked before the first one starts.

    Raises:
        UserError: names the stage, the option and the mend.
    """
    stages: list[Stage] = []
    for one in recipe.stages:
        results = {stage.name: str(stage.result) for stage in stages if stage.result is not None}
        try:
            stages.append(_resolved(one, recipe.settings, results, out, options_of(one.command)))
        except UserError as error:
            raise UserError(f"stage {one.name!r} ({one.command}): {error}") from error
    return stages


def _resolved(
    one: RecipeStage,
    settings: Mapping[str, Any],
    results: Mapping[str, str],
    out: Path,
    known: CommandOptions,
) -> Stage:
    names_result = RESULTS[one.command]
    result = None
    options = substitute(one.options, {**settings, **results})
    if names_result is not None:
        result = out / f"{one.name}{'.json' if one.command in FILES else ''}"
        if names_result in options:
            raise UserError(
                f"option {names_result!r} is given, and a pipeline decides it: {result}; remove it"
            )
        options[names_result] = str(result)
    if one.command == "distill" and not {"until_idle_s", "max_updates"} & options.keys():
        raise UserError("distill would never end; give until_idle_s or max_updates")
    launch = tuple(_words(str(substitute(one.launch or "", settings))))
    config: Any = build(known.config, options)
    if known.check is not None:
        known.check(config)
    if launch:
        program(launch[0])
    positional = tuple(
        field.name for field in dataclasses.fields(known.config) if field.metadata.get("positional")
    )
    needs = tuple(dict.fromkeys(name for name in _names_in(one.options) if name in results))
    recorded = substitute(one.options, {**settings, **{name: f"${{{name}}}" for name in results}})
    return Stage(one.name, one.command, launch, options, recorded, needs, positional, result)


def _words(launch: str) -> list[str]:
    try:
        return shlex.split(launch)
    except ValueError as error:
        raise UserError(f"launch is {launch!r} ({error}); mend its quotes") from error


def substitute(value: Any, names: Mapping[str, Any]) -> Any:
    """`value` with names replaced, in nested mappings and lists too. Text that is one name alone
    becomes its value, a number or list included.

    Raises:
        UserError: a name is no setting or earlier stage, or has no value.
    """
    if isinstance(value, dict):
        return {key: substitute(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [substitute(item, names) for item in value]
    if not isinstance(value, str):
        return value
    found = list(_names_in(value))
    for name in found:
        if name not in names:
            problem = unknown_key(name, list(names)).replace("option", "name")
            raise UserError(f"{value!r} is of no setting or earlier stage: {problem}")
        if names[name] is None:
            raise UserError(f"setting {name!r} has no value; give --set {name}=VALUE")
    if len(found) == 1 and value in (f"${{{found[0]}}}", f"${found[0]}"):
        return names[found[0]]
    return Template(value).substitute(names)


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _names_in(item)
    if not isinstance(value, str):
        return
    for match in Template.pattern.finditer(value):
        if match["invalid"] is not None:
            raise UserError(f"{value!r} has a $ without a name; write $$ for a dollar sign")
        if name := match["named"] or match["braced"]:
            yield name


def program(name: str) -> str:
    """Path of a launcher, which may lie beside our Python only."""
    found = shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)
    if found is None:
        raise UserError(f"launcher {name!r} is not installed; install it or remove 'launch'")
    return found
