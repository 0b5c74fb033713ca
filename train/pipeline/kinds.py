"""Commands that can be a stage: those that end by themselves. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from draftsmith.errors import UserError


class Kind(NamedTuple):
    # option that names the result, which the pipeline sets; None: the command only prints
    result: str | None = None
    suffix: str = ""  # of a result that is a file
    # The command goes on in its result when what it reads has grown, and when options changed.
    goes_on: bool = False
    # options of which one must be given, or the command would not end
    ends_by: tuple[str, ...] = ()


KINDS: Mapping[str, Kind] = {
    "plan": Kind(),
    "doctor": Kind(),
    "generate": Kind("out"),
    "train": Kind("out"),
    "eval": Kind("out", ".json"),
    "bench": Kind("out", ".json"),
    "distill": Kind("versions", goes_on=True, ends_by=("until_idle_s", "max_updates")),
    "export": Kind("out"),
}
# Options, or last parts of nested ones, whose files and folders a stage is made from, and which
# files of a folder those are.
INPUTS: Mapping[str, str] = {
    **dict.fromkeys(("target", "prompts", "data", "draft", "init", "deepspeed", "recipe"), "**/*"),
    "buffer": "*.parquet",  # not the marks that a reader leaves there
}


def kind_of(command: str) -> Kind:
    if command not in KINDS:
        raise UserError(f"command {command!r} is no stage; choose from {', '.join(KINDS)}")
    return KINDS[command]


def check_ends(command: str, options: Mapping[str, Any]) -> None:
    """Refuses a command that would run until it is stopped."""
    needed = kind_of(command).ends_by
    if needed and all(options.get(name) is None for name in needed):
        raise UserError(f"{command} would never end; give {' or '.join(needed)}")
