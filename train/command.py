"""`draftsmith train`."""

from __future__ import annotations

import os
from contextlib import ExitStack

from draftsmith.lock import folder_lock
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
    with ExitStack() as held:
        # The first of several processes holds the folders for all.
        for one in configs if os.environ.get("RANK", "0") == "0" else ():
            held.enter_context(folder_lock(one.out, "train"))
        _train(config, configs)
    return 0


def _train(config: TrainConfig, configs: list[TrainConfig]) -> None:
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
