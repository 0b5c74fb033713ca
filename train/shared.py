"""Several drafts trained at once: each batch takes one pass of the target for all of them.

Each has its own trainer, optimizer, schedule, checkpoints and folder, and becomes what it would be
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.config import TrainConfig
from draftsmith.train.objective.teacher import SharedSource
from draftsmith.train.session import (
    finish,
    keep_time,
    new_source,
    new_trainee_drafter,
    new_trainer,
    open_folder,
    prepare,
)
from draftsmith.train.turns import TakeTurns, Turns


def train_together(configs: Sequence[TrainConfig]) -> None:
    """`configs` differ in family, its shape and `out` alone."""
    material = prepare(configs[0])
    drafters = [new_trainee_drafter(config, material) for config in configs]
    taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))
    source = SharedSource(new_source(configs[0], material, taps), taps)
    trainers = [
        # One progress line: two would write over each other.
        new_trainer(
            config, material, drafter, source, shows=config is configs[0], drafts=len(configs)
        )
        for config, drafter in zip(configs, drafters, strict=True)
    ]
    checkpoints = [
        open_folder(config, material, trainer)
        for config, trainer in zip(configs, trainers, strict=True)
    ]
    keep_time(trainers)
    turns = Turns([passes_done(config) for config in configs])
    for number, trainer in enumerate(trainers):
        trainer.add_callback(TakeTurns(turns, number))
    turns.run(
        [
            partial(trainer.train, resume_from_checkpoint=checkpoint)
            for trainer, checkpoint in zip(trainers, checkpoints, strict=True)
        ]
    )
    for config, trainer in zip(configs, trainers, strict=True):
        finish(config, trainer, material)


def passes_done(config: TrainConfig) -> int:
    """Passes before the checkpoint that the run goes on from."""
    newest = RunFolder(config.out).newest()
    return 0 if newest is None else newest.step * newest.passes
