"""Typed configuration: dataclass defaults, then a YAML file, then `a.b=c` overrides, then flags.
Torch-free."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import shlex
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from draftsmith.errors import UserError, first_line

T = TypeVar("T")
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
}
DAY, TRUTH = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:bool"


MOST = 2.0**63  # that machines count to


class Limits(NamedTuple):
    """Interval of the numbers that an option may have."""

    low: float
    high: float = MOST
    ends: str = "[)"  # of the interval, as mathematics writes them

    def hold(self, value: float) -> bool:
        """Never true of NaN."""
        is_above = value >= self.low if self.ends[0] == "[" else value > self.low
        return is_above and (value <= self.high if self.ends[1] == "]" else value < self.high)

    def __str__(self) -> str:
        lower = f"{'at least' if self.ends[0] == '[' else 'above'} {self.low}"
        if self.high >= MOST:
            return lower
        return f"{lower} and {'at most' if self.ends[1] == ']' else 'below'} {self.high}"


AT_LEAST_1, NOT_NEGATIVE, POSITIVE = Limits(1), Limits(0), Limits(0, ends="()")
INSIDE, BELOW_1, SHARE, PART = (Limits(0, 1, ends) for ends in ("()", "[)", "[]", "(]"))
SECONDS = Limits(0, 10**9, "(]")  # that a process can wait
PORT = Limits(0, 2**16)
TOP = 64  # likeliest tokens that a recorded distribution holds
# Neither printed nor recorded, nor a word of a command line, which every user of a machine may
# list.
SECRET = "api_key"
TARGET, URL = "target", "url"  # options that a word without a name stands for


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    choices: Sequence[str] | None = None,
    limits: Limits | None = None,
    factory: Any = None,
    positional: bool = False,
) -> Any:
    """A dataclass field with the text `--help` shows. Numbers have `limits`. Give `factory` instead
    of `default` for mutable values."""
    metadata = {"help": help, "choices": choices, "limits": limits, "positional": positional}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def field_types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: hint for name, hint in hints.items() if name in names}


class YamlLoader(yaml.SafeLoader):
    """YAML where days, and on, off, yes and no, are text: a folder may be named by a day, and some
    options are on or off."""


YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag not in (DAY, TRUTH)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
YamlLoader.add_implicit_resolver(
    TRUTH, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def parse_yaml(text: str) -> Any:
    """Raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=YamlLoader)


def plain(wanted: Any) -> Any:
    """An annotated type without `| None`."""
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        return next(option for option in typing.get_args(wanted) if option is not type(None))
    return wanted


class FlagOption(NamedTuple):
    """An option that is a flag, or positional; those of sections are neither."""

    field: dataclasses.Field
    wanted: Any  # type, without `| None`

    @property
    def flag(self) -> str:
        """Flag that changes the default: it switches off what is on. `name=true` and `name=false`
        say both."""
        off = "no-" if self.wanted is bool and self.field.default is True else ""
        return f"--{off}{self.field.name.replace('_', '-')}"


def flag_options(cls: type) -> list[FlagOption]:
    types_by_name = field_types(cls)
    found = [FlagOption(one, plain(types_by_name[one.name])) for one in dataclasses.fields(cls)]
    return [one for one in found if not dataclasses.is_dataclass(one.wanted)]


def dotted_names(cls: type, prefix: str = "") -> list[str]:
    """Keys of all options, those in sections included."""
    names = []
    for name, wanted in field_types(cls).items():
        inner = plain(wanted)
        is_section = dataclasses.is_dataclass(inner)
        names += dotted_names(inner, f"{prefix}{name}.") if is_section else [prefix + name]
    return names


def shipped(path: str | Path) -> Path:
    """The file at `path`, or else the one that this package brings: `recipes/eagle3-8b.yaml`."""
    own = Path(__file__).parent / path
    return own if str(path).startswith("recipes/") and not Path(path).exists() else Path(path)


def read_yaml(path: str | Path) -> dict[str, Any]:
    path = shipped(path)
    if not path.is_file():
        raise UserError(f"recipe {str(path)!r} does not exist; give the path of a YAML file")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError as error:
        raise UserError(f"recipe {str(path)!r} is not UTF-8 ({error}); save it so") from error
    except yaml.YAMLError as error:
        raise UserError(
            f"recipe {str(path)!r} is not valid YAML ({first_line(error)}); mend that line"
        ) from error
    if not isinstance(values, dict):
        raise UserError(
            f"recipe {str(path)!r} holds a {type(values).__name__}; it must be a mapping of options"
        )
    return values


def parse_override(text: str) -> dict[str, Any]:
    """`"a.b=c"` -> `{"a": {"b": <c read as YAML>}}`."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise UserError(f"{text!r} is no option; one is written --name VALUE or name=VALUE")
    try:
        parsed: Any = parse_yaml(value) if value else ""
    except yaml.YAMLError as error:
        raise UserError(
            f"override {text!r} has a value that is not valid YAML; quote it, for example "
            f"{key}='text'"
        ) from error
    return at_path(key.split("."), parsed)


def at_path(path: Sequence[str], value: Any) -> dict[str, Any]:
    """`(("a", "b"), c)` -> `{"a": {"b": c}}`."""
    for part in reversed(path):
        value = {part: value}
    return value


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` wins; nested mappings are merged, neither input is changed."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def build(cls: type[T], values: dict[str, Any], prefix: str = "", *, root: type | None = None) -> T:
    """An instance of the dataclass `cls`; an unknown key or an ill-typed value raises a `UserError`
    that names the mend. `root` is the configuration that a section belongs to."""
    root = root or cls
    types_by_name = field_types(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in fields:
            inner = f".{next(iter(value))}" if isinstance(value, dict) and value else ""
            known = [prefix + name for name in fields]
            raise UserError(unknown_key(f"{prefix}{key}{inner}", known, dotted_names(root)))
    missing = [name for name, field in fields.items() if _required(field) and name not in values]
    if missing:
        flag = missing[0].replace("_", "-")
        alone = ", or its folder or Hub id alone" if flag == TARGET else ""
        raise UserError(f"option {prefix + missing[0]!r} is required; give --{flag}{alone}")
    converted = {}
    for key, value in values.items():
        choices = fields[key].metadata.get("choices")
        converted[key] = convert(value, types_by_name[key], prefix + key, root=root)
        chosen = converted[key] if isinstance(converted[key], tuple) else (converted[key],)
        if choices and any(one is not None and one not in choices for one in chosen):
            raise UserError(
                f"option {prefix + key!r} is {value!r}; it must be one of {', '.join(choices)}"
            )
    built = cls(**converted)
    if root is cls:
        check_limits(built)
    return built


def unknown_key(key: str, known: Sequence[str], others: Sequence[str] = (), lists: str = "") -> str:
    """Sentence on an unknown option. The mend is the one option of `others`, dotted keys, that
    has this name in another section; else the nearest of `known`; else `lists`, where they are."""
    name = key.rpartition(".")[2]
    near = [one for one in others if one.rpartition(".")[2] == name]
    if len(near) != 1:
        cutoff = 0.75 if key.startswith("-") else 0.6  # flags have their dashes alike
        near = difflib.get_close_matches(key, known, n=1, cutoff=cutoff)
    lists = lists or f"known options are {', '.join(sorted(known))}"
    return f"unknown option {key!r}; {f'did you mean {near[0]!r}?' if near else lists}"


def convert(value: Any, wanted: Any, name: str, *, root: type | None = None) -> Any:
    """`value` as the annotated type: bool, int, float, str, lists, optional values and nested
    dataclasses."""
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(wanted)
        if value is None and type(None) in options:
            return None
        return convert(value, plain(wanted), name, root=root)
    if dataclasses.is_dataclass(wanted):
        if dataclasses.is_dataclass(value):
            return value
        if not isinstance(value, dict):
            raise UserError(
                f"option {name!r} is {value!r}; it must be a mapping, for example {name}.KEY=VALUE"
            )
        return build(wanted, value, prefix=name + ".", root=root)  # type: ignore[arg-type]
    if origin in (list, tuple):
        items = value if isinstance(value, (list, tuple)) else [value]
        inner = typing.get_args(wanted)[0]
        return origin(convert(item, inner, name) for item in items)
    return _scalar(value, wanted, name)


def _scalar(value: Any, wanted: Any, name: str) -> Any:
    if wanted is Any or (
        isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
    ):
        return value
    try:
        if (
            wanted is bool
            and isinstance(value, str)
            and value.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0")
        ):
            return value.lower() in ("true", "yes", "on", "1")
        if wanted is float and not isinstance(value, bool):
            return float(value)
        if wanted is int and not isinstance(value, bool) and float(value) == int(float(value)):
            return int(float(value))
        if wanted is str and not isinstance(value, (dict, list)):
            return str(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"option {name!r} is {value!r}; it must be {KINDS[wanted]}")


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def changed(config: Any) -> dict[str, Any]:
    """Options that are not at their defaults, sections as mappings."""
    found = {}
    for field in dataclasses.fields(config):
        value, make = getattr(config, field.name), field.default_factory
        usual: Any = field.default if make is dataclasses.MISSING else make()
        if dataclasses.is_dataclass(value):
            value, usual = changed(value), {}
        if value != usual:
            found[field.name] = value
    return found


def command_line(name: str, config: Any) -> str:
    """The command as it is typed, without defaults, secrets and logins of addresses."""
    return shlex.join(["draftsmith", *map(without_login, command_words(name, config))])


def command_words(name: str, config: Any) -> list[str]:
    """Words of a command behind `draftsmith`, without defaults and secrets."""
    given, first, target, flags = changed(config), [], [], []
    given.pop(SECRET, None)
    for field, wanted in flag_options(type(config)):
        value = given.get(field.name)
        # Of what is neither on nor off by default, a flag says only that it is on.
        if value is None or (wanted is bool and value is (field.default is True)):
            continue
        del given[field.name]
        values = [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
        if field.metadata["positional"]:
            first += values
        elif field.name == TARGET and not ("=" in value or value.endswith((".yaml", ".yml"))):
            target += values
        else:
            flags += [FlagOption(field, wanted).flag, *([] if wanted is bool else values)]
    return [name, *first, *target, *assignments(given), *flags]


def without_login(text: str) -> str:
    """http://user:password@host -> http://host"""
    return re.sub(r"://[^/\s]*@", "://", text)


def short_names(paths: Iterable[str]) -> list[str]:
    """Last parts of the paths, as many as make them differ."""
    split = [Path(path).parts for path in paths]
    depths = range(1, 1 + max(map(len, split), default=0))
    named = [["/".join(parts[-depth:]) for parts in split] for depth in depths]
    return next((names for names in named if len(set(names)) == len(split)), [*paths])


def for_others(value: Any) -> Any:
    """A record without folders of this machine, of whose paths the last part stays, and without
    logins of addresses."""
    if isinstance(value, Mapping):
        names = [for_others(key) for key in value]
        names = names if len(set(names)) == len(value) else short_names(value)
        return {name: for_others(one) for name, one in zip(names, value.values())}
    if isinstance(value, list | tuple):
        return [for_others(one) for one in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"(?<!\S)(\w+:(?!//))?[/~.]\S*/(?=[^\s/])", r"\1", without_login(value))


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


def out_of_limits(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Limits]]:
    """(name, value, limits) of each number that lies out of them, sections of `config` included.
    An option that is not given has no limits."""
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from out_of_limits(value, f"{name}.")
        elif value is not None and (held := field.metadata.get("limits")) is not None:
            each = value if isinstance(value, (list, tuple)) else (value,)
            yield from ((name, one, held) for one in each if not held.hold(one))


def check_limits(config: Any, prefix: str = "") -> None:
    """Raises a `UserError` for the first number out of its limits. `prefix` stands before names of
    options: "learn." for a section that is checked alone."""
    for name, value, limits in out_of_limits(config, prefix):
        top = " and finite" if value == math.inf else " and below 2**63" if value >= MOST else ""
        raise UserError(f"option {name!r} is {value!r}; it must be {limits}{top}")
