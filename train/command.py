"""`draftsmith train`."""

from __future__ import annotations

import os
from contextlib import nullcontext

from draftsmith.lock import folder_lock
from draftsmith.train import resolve
from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.config import TrainConfig
from draftsmith.train.quiet import quiet


def run(config: TrainConfig) -> int:
    # Before the libraries, which take seconds to import: a wrong option is an error at once.
    resolve.check(config)
    RunFolder(config.out).check(config)
    # The first of several processes holds the folder for all.
    is_first = os.environ.get("RANK", "0") == "0"
    with folder_lock(config.out, "train") if is_first else nullcontext():
        quiet()
        from draftsmith.drafters.target.sharded import leave_group
        from draftsmith.train.session import train

        train(config)
        leave_group()
    return 0
