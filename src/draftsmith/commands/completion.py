"""`draftsmith completion`: a script that completes commands, flags and values, by shtab."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from draftsmith.commands.arguments import Parser, parser_for
from draftsmith.commands.table import COMMANDS, load
from draftsmith.config import flag_options, option

SHELLS = ("bash", "zsh", "tcsh")


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    shell: str = option(
        help='the shell; for bash: eval "$(draftsmith completion bash)" in ~/.bashrc',
        positional=True,
        choices=SHELLS,
    )


def run(config: CompletionConfig) -> int:
    print(script_for(config.shell))
    return 0


def script_for(shell: str) -> str:
    import shtab  # late, as all that is not for the options

    return shtab.complete(whole_parser(), shell=shell)


def whole_parser() -> argparse.ArgumentParser:
    """All commands below one parser. Values are those of an option's choices, else files."""
    import shtab

    whole = argparse.ArgumentParser(prog="draftsmith")
    commands = whole.add_subparsers(parser_class=Parser)
    for name, command in COMMANDS.items():
        cls = load(command.config)
        parser = parser_for(name, cls)
        choices = {one.field.name: one.field.metadata["choices"] for one in flag_options(cls)}
        for action in parser._actions:
            action.choices = choices.get(action.dest)
            if action.choices is None and action.nargs != 0:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        commands.add_parser(name, help=command.summary, parents=[parser], add_help=False)
    return whole
