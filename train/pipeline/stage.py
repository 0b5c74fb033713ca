"""A stage with its names resolved and its options checked, and the command line that runs it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from draftsmith.api_key import with_key
from draftsmith.config import build, parse_yaml
from draftsmith.errors import UserError
from draftsmith.train.pipeline.kinds import Kind, check_ends, kind_of
from draftsmith.train.pipeline.names import names_in, substitute
from draftsmith.train.pipeline.recipe import Recipe, RecipeStage

# Options whose values are neither printed nor recorded, nor words of a command line, which every
# user of a machine may list.
SECRETS = ("api_key",)


class CommandOptions(NamedTuple):
    """Options of one command: their dataclass, and a check that raises a `UserError` for values
    that no run could use."""

    config: type
    check: Callable[[Any], object]


OptionsOf = Callable[[str], CommandOptions]


@dataclass(frozen=True)
class Stage:
    name: str
    command: str
    launch: tuple[str, ...]
    options: dict[str, Any]  # with the paths of earlier results
    # the same, with `${name}` for those, so that a folder may be moved
    recorded: dict[str, Any]
    needs: tuple[str, ...]  # earlier stages whose results it reads
    positional: tuple[str, ...]  # options that the command takes without their names
    result: Path | None

    def kind(self) -> Kind:
        return kind_of(self.command)

    def words(self) -> list[str]:
        """Arguments of `draftsmith`; secrets are masked."""
        given = [self.options[name] for name in self.positional if name in self.options]
        first = [
            str(one) for value in given for one in (value if isinstance(value, list) else [value])
        ]
        named = {name: value for name, value in self.options.items() if name not in self.positional}
        named = {name: "***" if name in SECRETS else value for name, value in named.items()}
        return [self.command, *first, *assignments(named)]

    def process(self) -> list[str]:
        """The program and its arguments, which are without secrets."""
        first = [program(self.launch[0]), *self.launch[1:]] if self.launch else [sys.executable]
        options = {name: value for name, value in self.options.items() if name not in SECRETS}
        return [*first, "-m", "draftsmith.cli", *replace(self, options=options).words()]

    def environment(self) -> dict[str, str]:
        """Environment of the process, which has the secrets."""
        key = self.options.get("api_key")
        return with_key(None if key is None else str(key))

    def shown(self) -> str:
        launch = [*self.launch, "-m", "draftsmith.cli"] if self.launch else ["draftsmith"]
        return shlex.join([*launch, *self.words()])


def assignments(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`a.b=c` of every option, which every command reads as YAML."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from assignments(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_written(value)}"


def _written(value: Any) -> str:
    """YAML of one line that is read as `value` again."""
    if isinstance(value, str) and value.strip() == value:
        try:
            if value and parse_yaml(value) == value:
                return value
        except yaml.YAMLError:
            pass
    return json.dumps(value, ensure_ascii=False)


def resolve(recipe: Recipe, out: Path, options_of: OptionsOf) -> list[Stage]:
    """Every stage of the recipe, checked before the first one starts.

    Raises:
        UserError: names the stage, the option and the mend.
    """
    stages: list[Stage] = []
    for one in recipe.stages:
        try:
            stages.append(_resolved(one, recipe, stages, out, options_of))
        except UserError as error:
            raise UserError(f"stage {one.name!r} ({one.command}): {error}") from error
    return stages


def _resolved(
    one: RecipeStage, recipe: Recipe, before: list[Stage], out: Path, options_of: OptionsOf
) -> Stage:
    kind = kind_of(one.command)
    if kind.result in one.options:
        raise UserError(
            f"option {kind.result!r} is given, and a pipeline decides it: {out / one.name}; "
            "remove it"
        )
    results = {stage.name: str(stage.result) for stage in before if stage.result is not None}
    _check_order(one, recipe, results)
    options = substitute(one.options, recipe.settings | results)
    recorded = substitute(one.options, recipe.settings | {name: f"${{{name}}}" for name in results})
    result = None if kind.result is None else out / f"{one.name}{kind.suffix}"
    if kind.result is not None:
        options |= {kind.result: str(result)}
    launch = _words_of(str(substitute(one.launch or "", recipe.settings)))
    check_options(one.command, options, options_of(one.command), launch)
    positional = (
        field.name
        for field in dataclasses.fields(options_of(one.command).config)
        if field.metadata.get("positional")
    )
    needs = tuple(dict.fromkeys(name for name in names_in(one.options) if name in results))
    return Stage(one.name, one.command, launch, options, recorded, needs, tuple(positional), result)


def _words_of(launch: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(launch))
    except ValueError as error:
        raise UserError(f"launch is {launch!r} ({error}); mend its quotes") from error


def _check_order(one: RecipeStage, recipe: Recipe, results: Mapping[str, str]) -> None:
    """Refuses the result of a stage that is not an earlier one, or has none."""
    stages = {stage.name for stage in recipe.stages}
    for name in names_in(one.options):
        if name in stages and name not in results:
            raise UserError(
                f"${{{name}}} is no result of an earlier stage; move stage {name!r} up, or name "
                f"another of {', '.join(results) or 'none'}"
            )


def check_options(
    command: str, options: dict[str, Any], known: CommandOptions, launch: tuple[str, ...]
) -> None:
    check_ends(command, options)
    known.check(build(known.config, options))
    if launch:
        program(launch[0])


def program(name: str) -> str:
    """Path of a launcher, which may lie beside our Python only."""
    found = shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)
    if found is None:
        raise UserError(f"launcher {name!r} is not installed; install it or remove 'launch'")
    return found
