"""The `draftsmith` command. Torch-free until a command runs, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import os
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from draftsmith import config as configuration
from draftsmith.errors import UserError
from draftsmith.extras import check_extra, extra_of, missing
from draftsmith.version import __version__


class Command(NamedTuple):
    config: str
    run: str
    summary: str
    extra: str | None = None  # whose packages the command cannot begin without
    # of its options alone, before anything is read: what a pipeline does with all its stages
    check: str | None = None


COMMANDS = {
    "generate": Command(
        "draftsmith.distill.config:GenerateConfig",
        "draftsmith.distill.generate.command:run",
        "let the target answer prompts; a dataset to train on",
        "train",
        "draftsmith.distill.generate.command:check",
    ),
    "train": Command(
        "draftsmith.train.config:TrainConfig",
        "draftsmith.train.command:run",
        "train a drafter of any family by distillation",
        "train",
        "draftsmith.train.resolve:check_each",
    ),
    "eval": Command(
        "draftsmith.train.config:EvalConfig",
        "draftsmith.train.evaluate.command:run",
        "alpha_i and tau of a draft, with confidence intervals",
        "train",
        "draftsmith.train.evaluate.command:check_options",
    ),
    "serve": Command(
        "draftsmith.serve.config:ServeConfig",
        "draftsmith.serve_command:run",
        "an OpenAI-compatible server with lossless speculation",
        "serve",
    ),
    "distill": Command(
        "draftsmith.distill.config:DistillConfig",
        "draftsmith.distill.command:run",
        "the online daemon: learn from served traffic, publish gated versions",
        "train",
        "draftsmith.distill.command:check",
    ),
    "observe": Command(
        "draftsmith.fleet.observe.config:ObserveConfig",
        "draftsmith.fleet.observe.command:run",
        "a proxy that records the traffic of another server, to learn from",
        "serve",
    ),
    "forget": Command(
        "draftsmith.distill.config:ForgetConfig",
        "draftsmith.distill.buffer.forget:run",
        "take an answer's records out of a buffer, and out of what learners keep",
    ),
    "export": Command(
        "draftsmith.train.export.config:ExportConfig",
        "draftsmith.train.export.command:run",
        "write a draft in the layout vLLM, SGLang or transformers load",
        check="draftsmith.train.export.command:check_options",
    ),
    "bench": Command(
        "draftsmith.serve.bench.config:BenchConfig",
        "draftsmith.serve.bench.command:run",
        "tok/s, TTFT, TPOT and tau, speculation off against on",
        "serve",
        "draftsmith.serve.bench.command:check",
    ),
    "audit": Command(
        "draftsmith.serve.audit.config:AuditConfig",
        "draftsmith.audit_command:run",
        "is it lossless? statistics with negative controls",
        "serve",
    ),
    "doctor": Command(
        "draftsmith.train.doctor.config:DoctorConfig",
        "draftsmith.train.doctor.command:run",
        "what would go wrong with this target, draft and data",
    ),
    "plan": Command(
        "draftsmith.train.plan.config:PlanConfig",
        "draftsmith.train.plan.command:run",
        "which draft for this target, what it gains and what the run takes",
        check="draftsmith.train.plan.command:check",
    ),
    "run": Command(
        "draftsmith.train.pipeline.config:RunConfig",
        "draftsmith.run_command:run",
        "a pipeline of these commands from one recipe, resumed, with a report",
    ),
    "top": Command(
        "draftsmith.serve.dashboard.config:TopConfig",
        "draftsmith.serve.dashboard.top:run",
        "a running server in the terminal: tau, alpha, speed, versions, the learner",
        "serve",
    ),
    "fleet": Command(
        "draftsmith.fleet.config:FleetConfig",
        "draftsmith.fleet.command:run",
        "many engines with one draft: status, promote, rollback, page, publish",
        "fleet",
    ),
}


EXTRA = "recipe.yaml | key=value"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse lists the optional extra among what is missing.
        raise UserError(f"{message.replace(f', {EXTRA}', '')}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. A `UserError` is printed as one sentence and gives
    2."""
    try:
        try:
            return _dispatch(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output left, as `| head` does. Python would print another error while
        # flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UserError as error:
        print(f"draftsmith: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "draftsmith: interrupted; what was finished is kept, run the same command to go on",
            file=sys.stderr,
        )
        return 130


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"draftsmith {__version__}")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        raise UserError(
            configuration.unknown_key(name, list(COMMANDS)).replace("option", "command")
        )
    cls = load(COMMANDS[name].config)
    parser = parser_for(name, cls)
    arguments = parse(parser, argv[1:])
    config = configuration.build(cls, collect(cls, arguments))
    check_extra(name, COMMANDS[name].extra)
    try:
        return int(load(COMMANDS[name].run)(config) or 0)
    except ModuleNotFoundError as error:
        extra = extra_of(error.name)
        if extra is None:
            raise
        raise missing(name, str(error.name).split(".")[0], extra) from error


def overview() -> str:
    lines = ["usage: draftsmith COMMAND [options] [recipe.yaml] [key=value ...]", ""]
    lines += [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "draftsmith COMMAND --help lists the options of one command."])


def load(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def parser_for(name: str, cls: type) -> Parser:
    """Flags from the top-level fields of the config dataclass; nested ones are reached by recipe or
    `a.b=c`."""
    fields = dataclasses.fields(cls)
    types_by_name = configuration.field_types(cls)
    listed = [one.name for one in fields if is_listed(one, _plain(types_by_name[one.name]))]
    positional = [
        f"[{one.name.upper()} ...]" if one.name in listed else one.name.upper()
        for one in fields
        if one.metadata.get("positional")
    ]
    usage = " ".join([f"draftsmith {name}", *positional, "[options]", f"[{EXTRA} ...]"])
    parser = Parser(
        prog=f"draftsmith {name}",
        usage=usage,
        description=COMMANDS[name].summary,
        allow_abbrev=False,
    )
    titles = {one.name: help_title(cls, one.name) for one in fields}
    groups = {title: parser.add_argument_group(title) for title in titles.values() if title}
    for field in fields:
        wanted = _plain(types_by_name[field.name])
        if field.name in listed:
            continue
        if field.metadata.get("positional"):
            parser.add_argument(
                field.name, help=_help(field), choices=field.metadata.get("choices")
            )
        elif not dataclasses.is_dataclass(wanted):
            _add_flag(groups.get(titles[field.name], parser), field, wanted)
    parser.add_argument(
        "extra", nargs="*", metavar=EXTRA, help="a recipe, then overrides such as optim.lr=1e-4"
    )
    return parser


def help_title(cls: type, name: str) -> str:
    """Heading of an option in `--help`: that of the class that declares it first, or ""."""
    for base in reversed(cls.__mro__):
        if name in inspect.get_annotations(base):
            return base.__dict__.get("HELP_TITLE", "")
    return ""


def is_listed(field: dataclasses.Field, wanted: Any) -> bool:
    """True of a positional list, whose words stand among recipes and overrides."""
    return bool(field.metadata.get("positional")) and typing.get_origin(wanted) in (list, tuple)


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        flags = [
            flag
            for action in parser._actions
            for flag in action.option_strings
            if flag.startswith("--")
        ]
        raise UserError(configuration.unknown_key(unknown[0].split("=")[0], flags))
    return arguments


def _add_flag(parser: argparse._ActionsContainer, field: dataclasses.Field, wanted: Any) -> None:
    names = [field.name, *filter(None, [field.metadata.get("also")])]
    flags = ["--" + name.replace("_", "-") for name in names]
    shared: dict[str, Any] = {"dest": field.name, "default": None, "help": _help(field)}
    if wanted is bool:
        parser.add_argument(*flags, **shared, action=argparse.BooleanOptionalAction)
    elif typing.get_origin(wanted) in (list, tuple):
        parser.add_argument(*flags, **shared, nargs="+", action="extend", metavar="X")
    else:
        parser.add_argument(*flags, **shared, metavar=field.name.upper())


def _plain(wanted: Any) -> Any:
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        return next(option for option in typing.get_args(wanted) if option is not type(None))
    return wanted


def _help(field: dataclasses.Field) -> str:
    text = field.metadata.get("help", "")
    if choices := field.metadata.get("choices"):
        text += f" ({', '.join(choices)})"
    shown = field.default not in (dataclasses.MISSING, None, "", False, ())
    return (text + (f" [default: {field.default}]" if shown else "")).replace("%", "%%")


def collect(cls: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Recipe, then overrides, then flags."""
    values: dict[str, Any] = {}
    given_extra = [*arguments.extra, *behind_lists(cls, arguments)]
    types_by_name, listed = configuration.field_types(cls), {}
    for field in dataclasses.fields(cls):
        if is_listed(field, types_by_name[field.name]):
            listed[field.name] = [text for text in given_extra if text in field.metadata["choices"]]
    words = [word for found in listed.values() for word in found]
    extra = [text for text in given_extra if text not in words]
    recipes = [text for text in extra if text.endswith((".yaml", ".yml")) and "=" not in text]
    given = [configuration.read_yaml(recipe) for recipe in recipes]
    given += [configuration.parse_override(text) for text in extra if text not in recipes]
    for one in given:
        values = configuration.merge(values, configuration.under_first_names(cls, one))
    flags = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(cls)}
    return configuration.merge(
        values,
        {name: value for name, value in flags.items() if value is not None}
        | {name: found for name, found in listed.items() if found},
    )


def behind_lists(cls: type, arguments: argparse.Namespace) -> list[str]:
    """Recipes and overrides that follow a flag of several values, which argparse counts among
    these; they are taken out of them. The first value is the flag's own."""
    names = [field.name for field in dataclasses.fields(cls)]
    found = []
    for name in names:
        if isinstance(given := getattr(arguments, name, None), list):
            extra = [text for text in given[1:] if _is_extra(text, names)]
            kept = [text for text in given[1:] if text not in extra]
            setattr(arguments, name, [given[0], *kept])
            found += extra
    return found


def _is_extra(text: str, names: Sequence[str]) -> bool:
    key, separator, _ = text.partition("=")
    return text.endswith((".yaml", ".yml")) if not separator else key.split(".")[0] in names


if __name__ == "__main__":
    sys.exit(main())
