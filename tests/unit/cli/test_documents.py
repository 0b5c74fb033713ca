"""Commands in the documents are commands that there are: their flags exist and their values are of
the right kind."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from draftsmith import config as configuration
from draftsmith.cli import COMMANDS, collect, load, parse, parser_for
from draftsmith.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = (
    "README.md",
    "docs/operations.md",
    "docs/online.md",
    "docs/losslessness.md",
    "docs/training.md",
)
CODE = re.compile(r"^```\w*\n(.*?)^```|((?:^    .*\n)+)", re.MULTILINE | re.DOTALL)
LAUNCHER = re.compile(r"^torchrun .* -m draftsmith\.cli ")


def commands(text: str) -> list[str]:
    """The lines of code blocks that call draftsmith."""
    lines = [
        line.strip()
        for found in CODE.finditer(text)
        for line in (found[1] or found[2]).splitlines()
    ]
    lines = [LAUNCHER.sub("draftsmith ", line) for line in lines]
    return [line for line in lines if re.match(r"draftsmith [a-z]", line)]


def check(command: str) -> None:
    name, *argv = shlex.split(command, comments=True)[1:]
    config = load(COMMANDS[name].config)
    # A recipe is read from the repository's root, where documents are read.
    argv = [str(ROOT / word) if word.endswith(".yaml") else word for word in argv]
    configuration.build(config, collect(config, parse(parser_for(name, config), argv)))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_documents_are_understood(document: str) -> None:
    found = commands((ROOT / document).read_text())
    assert found
    for command in found:
        try:
            check(command)
        except (UserError, KeyError) as error:
            raise AssertionError(f"{document}: {command}: {error}") from error


def test_what_is_no_command_is_noticed() -> None:
    text = (
        "\n```sh\ndraftsmith serve --target $T --k-auto  # no such flag\n```\n    torchrun x -m "
        "draftsmith.cli serve\n"
    )
    assert commands(text) == [
        "draftsmith serve --target $T --k-auto  # no such flag",
        "draftsmith serve",
    ]
    with pytest.raises(UserError, match="--k-auto"):
        check(commands(text)[0])
    with pytest.raises(UserError, match="required"):
        check(commands(text)[1])
