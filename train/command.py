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
    leave_group()
    return 0


def leave_group() -> None:
    """Ends the process group while every rank is there. Left to the interpreter's exit, its threads
    abort now and then a rank that had finished ("terminate called without an active exception"),
    and torchrun calls the run failed."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
