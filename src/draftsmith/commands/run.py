"""`draftsmith run`: joins the pipeline, which runs stages, to the table of the commands that they
are."""

from __future__ import annotations

from pathlib import Path

from draftsmith.commands.table import COMMANDS, load
from draftsmith.errors import check_extra
from draftsmith.progress import say_loading
from draftsmith.train.config import RunConfig
from draftsmith.train.stages import CommandOptions, read_recipe, resolve


def run(config: RunConfig) -> int:
    from draftsmith.train.pipeline import run_stages, show

    recipe = read_recipe(config.recipe, config.set)
    out = Path(config.out or Path("runs") / recipe.path.stem)
    stages = resolve(recipe, out, options_of)
    if config.dry_run:
        show(stages, out)
    else:
        run_stages(stages, out, recipe.path.stem)
    return 0


def options_of(name: str) -> CommandOptions:
    """Options of a command, and the check that it makes before it begins."""
    command = COMMANDS[name]
    check_extra(name, command.extra)
    if command.loads:
        say_loading()  # as the check of its options does
    return CommandOptions(load(command.config), load(command.check) if command.check else None)
