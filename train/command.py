"""`draftsmith train`."""

from __future__ import annotations

from draftsmith.train import resolve
from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.config import TrainConfig
from draftsmith.train.quiet import quiet


def run(config: TrainConfig) -> int:
    # Before the libraries, which take seconds to import: a wrong option is an error at once.
    configs = resolve.by_family(config)
    for one in configs:
        resolve.check(one)
        RunFolder(one.out).check(one)
    quiet()
    from draftsmith.drafters.target.ranks import leave_group
    from draftsmith.train.session import train
    from draftsmith.train.shared import train_together

    if config.shared_target:
        train_together(configs)
    else:
        for one in configs:
            train(one)
    leave_group()
    return 0
