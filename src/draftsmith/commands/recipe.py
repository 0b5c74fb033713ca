"""`draftsmith config`: the options of a command with their defaults, as a recipe that the command
reads back. Torch-free."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from draftsmith import config as configuration
from draftsmith.commands.arguments import described
from draftsmith.commands.table import COMMANDS, load
from draftsmith.config import option

WIDTH = 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    command: str = option(
        help="the command whose options are printed", positional=True, choices=tuple(COMMANDS)
    )


def run(config: RecipeConfig) -> int:
    print(recipe_of(config.command), end="")
    return 0


def recipe_of(name: str) -> str:
    """YAML of all options. Those without a default, and sections that are off, are comments."""
    head = f"# draftsmith {name} recipe.yaml: {COMMANDS[name].summary}\n"
    return "\n".join([head, *lines(load(COMMANDS[name].config)), ""])


def lines(cls: type, defaults: Any = None, indent: str = "") -> Iterator[str]:
    """Lines of a configuration or section, whose values `defaults` has where it is given."""
    kinds = configuration.field_types(cls)
    for field in dataclasses.fields(cls):
        wanted = configuration.plain(kinds[field.name])
        value = default_of(field) if defaults is None else getattr(defaults, field.name)
        margin = f"{indent}# "
        yield from textwrap.wrap(
            help_of(field, value),
            WIDTH,
            initial_indent=margin,
            subsequent_indent=margin,
            break_long_words=False,
            break_on_hyphens=False,
        )
        if dataclasses.is_dataclass(wanted):
            # A section that is None by default stays so when the recipe is read back.
            yield f"{indent if value is not None else margin}{field.name}:"
            inner = f"{indent}  " if value is not None else f"{margin}  "
            yield from lines(wanted, value, inner)  # type: ignore[arg-type]
        else:
            begin = margin if value is dataclasses.MISSING else indent
            yield f"{begin}{field.name}: {as_yaml(value)}".rstrip()


def default_of(field: dataclasses.Field) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def help_of(field: dataclasses.Field, value: Any) -> str:
    if value is not dataclasses.MISSING:
        return described(field)
    is_positional = field.metadata.get("positional")
    return f"{described(field)}; {'on the command line' if is_positional else 'required'}"


def as_yaml(value: Any) -> str:
    if value is dataclasses.MISSING:
        return ""
    plain = list(value) if isinstance(value, tuple) else value
    shown = yaml.safe_dump(plain, default_flow_style=True, width=10**9)
    return shown.removesuffix("...\n").strip()
