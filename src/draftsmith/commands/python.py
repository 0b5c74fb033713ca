"""The commands `train` and `distill` as Python functions, `draftsmith.train` and
`draftsmith.distill`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from draftsmith.commands.table import COMMANDS, load, start
from draftsmith.config import build, merge, read_yaml
from draftsmith.files import read_json

if TYPE_CHECKING:
    from transformers import TrainerCallback


class TrainedDraft(NamedTuple):
    """Draft that a training left, and where to look at it."""

    folder: Path
    steps: int
    tau: dict[float, float]  # measured on held-out prompts, by temperature; {} where none was
    metrics: Path  # a JSON object per line
    curves: Path  # PNG of them


class LearnedDraft(NamedTuple):
    """Live version when a learner ended."""

    folder: Path
    version: int
    updates: int  # of the candidate, since the first start
    published: int  # versions, since then
    decisions: Path  # of the gate, a JSON object per line


def train(
    family: str,
    target: str | Path,
    *,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    recipe: str | Path | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **options: Any,
) -> TrainedDraft:
    """Train a draft as `draftsmith train` does, and go on from the newest checkpoint of `out`.

    Args:
        recipe: a YAML file, whose values the options override.
        callbacks: called by transformers' Trainer; `on_evaluate` has the figures of held-out
            prompts (`eval_tau`, ...) and may stop the run. `EarlyStoppingCallback` is refused.
        options: those of the command by their names, sections as mappings: `optim={"lr": 1e-4}`.
    """
    given = {"family": family, "target": target, "data": data, "out": out, **options}
    start("train", configured("train", given, recipe), callbacks=callbacks)
    folder = Path(out)
    record = read_json(folder / "draftsmith.json")
    tau = {one["temperature"]: one["measured"]["tau"]["value"] for one in record["evaluation"]}
    steps = record["training"]["steps"]
    return TrainedDraft(folder, steps, tau, folder / "metrics.jsonl", folder / "curves.png")


def distill(
    target: str | Path,
    *,
    draft: str | Path,
    buffer: str | Path,
    versions: str | Path,
    recipe: str | Path | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> LearnedDraft:
    """Learn from recorded traffic as `draftsmith distill` does, until an interrupt, `stop`,
    `until_idle_s` or `max_updates`. `recipe` and `options` are as `train` has them."""
    given = {"target": target, "draft": draft, "buffer": buffer, "versions": versions, **options}
    start("distill", configured("distill", given, recipe), stop=stop)
    status = read_json(Path(versions) / "status.json")
    version, folder = status["version"], Path(versions)
    return LearnedDraft(
        folder / f"v{version:06d}",
        version,
        status["updates"],
        status["published"],
        folder / "decisions.jsonl",
    )


def configured(command: str, options: dict[str, Any], recipe: str | Path | None) -> Any:
    values = {} if recipe is None else read_yaml(recipe)
    return build(load(COMMANDS[command].config), merge(values, options))
