"""Options of `draftsmith run`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.config import option


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    recipe: str = option(
        help="YAML of settings and stages, such as recipes/pipelines/direct-alignment.yaml",
        positional=True,
    )
    set: tuple[str, ...] = option(
        (), "a setting of the recipe, target=T, or an option of a stage, pretrain.steps=200"
    )
    out: str | None = option(
        None, "folder of the stages' results and the report [default: runs/RECIPE]"
    )
    dry_run: bool = option(
        False, "check the recipe and print its commands, and which stages would be kept"
    )
