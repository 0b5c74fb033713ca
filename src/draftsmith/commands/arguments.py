"""Flags of a command from its configuration dataclass, and the values that a command line gives.
Torch-free."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from draftsmith import config as configuration
from draftsmith.commands.peers import in_our_names
from draftsmith.commands.table import COMMANDS
from draftsmith.config import TARGET, URL
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.progress import say

EXTRA = "recipe.yaml | key=value"
RECIPES = "config_files"
OF_TARGET = ("revision", "chat_template")  # peers' flags that make another name of the target here


class Parser(argparse.ArgumentParser):
    keys: Sequence[str] = ()  # of all options, those without a flag too
    first = ""  # the option that is given without a flag, if any

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Choices are checked with all others, in `config.build`."""

    def error(self, message: str) -> NoReturn:
        # argparse lists the optional extra among what is missing.
        raise UserError(f"{message.replace(f', {EXTRA}', '')}; see {self.prog} --help")


def parser_for(name: str, cls: type) -> Parser:
    """Flags from the top-level fields of the config dataclass; sections are reached by recipe or
    `a.b=c`."""
    fields = dataclasses.fields(cls)
    positional = [one.name.upper() for one in fields if one.metadata.get("positional")]
    target = ["[TARGET]"] if any(one.name == TARGET for one in fields) else []
    rest = ["[options]", f"[{EXTRA} ...]"] if len(positional) < len(fields) else []
    usage = " ".join([f"draftsmith {name}", *positional, *target, *rest])
    parser = Parser(
        prog=f"draftsmith {name}",
        usage=usage,
        description=COMMANDS[name].summary,
        allow_abbrev=False,
    )
    parser.keys = configuration.dotted_names(cls)
    groups = flag_groups(parser, cls)
    for option in configuration.flag_options(cls):
        field = option.field
        if field.metadata.get("positional"):
            choices = field.metadata.get("choices")
            parser.add_argument(field.name, help=_help(field), choices=choices)
            parser.first = field.name
        else:
            _add_flag(groups.get(field.name, parser), option)
    for one in OF_TARGET if target else ():
        parser.add_argument(f"--{one.replace('_', '-')}", help=argparse.SUPPRESS)
    if not rest:
        parser.set_defaults(extra=[], **{RECIPES: []})
        return parser
    parser.add_argument(
        "--config",
        dest=RECIPES,
        action="append",
        default=[],
        metavar="FILE",
        help="a recipe whose name need not end in .yaml",
    )
    parser.add_argument(
        "extra",
        nargs="*",
        metavar=EXTRA,
        help="a recipe, then overrides of it"
        + ("; a word alone is the target" if target else "")
        + ("; an http:// address alone is --url" if URL in parser.keys else ""),
    )
    return parser


def flag_groups(parser: Parser, cls: type) -> dict[str, argparse._ArgumentGroup]:
    """Group of `--help` of each option that has a heading, by its name."""
    fields = dataclasses.fields(cls)
    titles = {one.name: title for one in fields if (title := help_title(cls, one.name))}
    groups = {title: parser.add_argument_group(title) for title in titles.values()}
    return {name: groups[title] for name, title in titles.items()}


def help_title(cls: type, name: str) -> str:
    """Heading of an option in `--help`: that of the class that declares it first, or ""."""
    for base in reversed(cls.__mro__):
        if name in inspect.get_annotations(base):
            return base.__dict__.get("HELP_TITLE", "")
    return ""


def parse(
    parser: Parser, argv: Sequence[str], tell: Callable[[str], None] = say
) -> argparse.Namespace:
    """Values of a command line; `tell` takes a line for each name that is a peers'."""
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    words = in_our_names(argv, flags, parser.keys, tell)
    arguments, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        name, lists = unknown[0].split("=")[0], f"{parser.prog} --help lists all"
        raise UserError(configuration.unknown_key(name, flags, lists=lists))
    if parser.first and hasattr(arguments, "extra"):  # which may stand before it
        given = [getattr(arguments, parser.first), *arguments.extra]
        keys = [key.split(".")[0] for key in parser.keys]
        named = [text for text in given if not _is_extra(text, keys)] or given
        setattr(arguments, parser.first, named[0])
        given.remove(named[0])
        arguments.extra = given
    return arguments


def _add_flag(parser: argparse._ActionsContainer, option: configuration.FlagOption) -> None:
    field, wanted = option.field, option.wanted
    shared: dict[str, Any] = {"dest": field.name, "default": None, "help": _help(field)}
    if wanted is bool:
        actions: dict[Any, Any] = {False: "store_true", True: "store_false"}
        action = actions.get(field.default, argparse.BooleanOptionalAction)
        parser.add_argument(option.flag, **shared, action=action)
    elif typing.get_origin(wanted) in (list, tuple):
        parser.add_argument(option.flag, **shared, nargs="+", action="extend", metavar="X")
    else:
        parser.add_argument(option.flag, **shared, metavar=field.name.upper())


def described(field: dataclasses.Field) -> str:
    """Help text of an option, with its choices."""
    choices = ", ".join(filter(None, field.metadata.get("choices") or ()))  # "": not given
    return field.metadata.get("help", "") + (f" ({choices})" if choices else "")


def _help(field: dataclasses.Field) -> str:
    text = described(field)
    if field.default is True:
        text = f"switch off: {text}"
    shown = field.default not in (dataclasses.MISSING, None, "", False, True, ())
    return (text + (f" [default: {field.default}]" if shown else "")).replace("%", "%%")


def collect(
    cls: type, arguments: argparse.Namespace, tell: Callable[[str], None] = say
) -> dict[str, Any]:
    """Recipe, then overrides, then flags; `tell` takes a line about a target that is recorded."""
    values: dict[str, Any] = {}
    extra = [*arguments.extra, *behind_lists(cls, arguments)]
    recipes = [text for text in extra if text.endswith((".yaml", ".yml")) and "=" not in text]
    rest = [text for text in extra if text not in recipes]
    words = unnamed(cls, arguments, rest)
    given = [configuration.read_yaml(one) for one in (*getattr(arguments, RECIPES), *recipes)]
    given += [words.get(text) or configuration.parse_override(text) for text in rest]
    for one in given:
        values = configuration.merge(values, one)
    for option in configuration.flag_options(cls):
        if (value := getattr(arguments, option.field.name, None)) is not None:
            values |= {option.field.name: value}
    values |= recorded_target(cls, values, tell)
    return values | renamed_target(values.get(TARGET), arguments, tell)


def renamed_target(
    name: Any, arguments: argparse.Namespace, tell: Callable[[str], None]
) -> dict[str, str]:
    """The target of another revision, or with another template for chats."""
    revision, template = (getattr(arguments, one, None) for one in OF_TARGET)
    if revision is None and template is None:
        return {}
    if not name:
        raise UserError("--revision or --chat-template is given without a target; give --target")
    name = f"{name}@{revision}" if revision else name
    if template:
        from draftsmith.drafters.layouts.template import with_template

        name = str(with_template(name, template))
    tell(f"the target is {name}")
    return {TARGET: name}


def recorded_target(
    cls: type, values: dict[str, Any], tell: Callable[[str], None]
) -> dict[str, str]:
    """The target that a local draft's record names, where a command needs one and nothing else that
    is given says which."""
    draft = values.get("draft")
    if not isinstance(draft, str) or values.get(TARGET) or values.get(URL):
        return {}
    path = Path(draft) / "draftsmith.json"
    fields = {one.name: one for one in dataclasses.fields(cls)}
    is_required = TARGET in fields and fields[TARGET].default is dataclasses.MISSING
    # These need a target where no URL is given; the doctor's data say theirs.
    may_need = {TARGET, URL} <= fields.keys() and not values.get("data")
    if not (is_required or may_need):
        return {}
    if not path.is_file():
        raise UserError(
            f"no target is given, and {str(path)!r}, which would name it, is not there; give "
            "--target, or another --draft"
        )
    record = read_json(path).get(TARGET)
    name = record.get("name") if isinstance(record, dict) else None
    if not isinstance(name, str):
        return {}
    tell(f"the target is {name!r}, as {str(path)!r} records")
    return {TARGET: name}


def unnamed(
    cls: type, arguments: argparse.Namespace, extra: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Options by the words that give them without a name: the target, and a server's URL."""
    names, words = [one.name for one in dataclasses.fields(cls)], {}
    for text in extra:
        name = URL if URL in names and text.startswith(("http://", "https://")) else TARGET
        if name in names and (name == URL or "=" not in text):
            words[text] = {name: text}
    targets = [text for text, option in words.items() if TARGET in option]
    given = [*targets, *filter(None, [getattr(arguments, TARGET, None)])]
    if targets and len(given) > 1:
        raise UserError(
            f"{given[0]!r} and {given[1]!r} are both given as the target; leave one of them out, "
            "or write options as --name value or key=value"
        )
    return words


def behind_lists(cls: type, arguments: argparse.Namespace) -> list[str]:
    """Recipes and overrides that follow a flag of several values, which argparse counts among
    these; they are taken out of them. The first value is the flag's own."""
    keys = [field.name for field in dataclasses.fields(cls)]
    found = []
    for name in keys:
        if isinstance(given := getattr(arguments, name, None), list):
            extra = [text for text in given[1:] if _is_extra(text, keys)]
            kept = [text for text in given[1:] if text not in extra]
            setattr(arguments, name, [given[0], *kept])
            found += extra
    return found


def _is_extra(text: str, keys: Collection[str]) -> bool:
    key, separator, _ = text.partition("=")
    return text.endswith((".yaml", ".yml")) if not separator else key.split(".")[0] in keys
