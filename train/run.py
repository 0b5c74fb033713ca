"""`draftsmith train`."""

from __future__ import annotations

from draftsmith.train import resolve
from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.config import TrainConfig
from draftsmith.train.quiet import quiet


def run(config: TrainConfig) -> int:
    # Wrong options are told at once; the libraries take seconds to import.
    resolve.check(config)
    RunFolder(config.out).check(config)
    quiet()
    from draftsmith.train.session import train

    train(config)
    return 0
