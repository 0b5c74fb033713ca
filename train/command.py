"""`draftsmith train`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from draftsmith.drafters.layouts.hub import check_named
from draftsmith.lock import folder_lock
from draftsmith.progress import loading
from draftsmith.train import resolve
from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.config import TrainConfig
from draftsmith.train.data.folders import check_folders
from draftsmith.train.quiet import quiet

if TYPE_CHECKING:
    from transformers import TrainerCallback


def run(config: TrainConfig, callbacks: Sequence[TrainerCallback] = ()) -> int:
    # Before the libraries, which take seconds to import: a wrong option is an error at once.
    resolve.check(config)
    check_folders(config.data)
    RunFolder(config.out).check(config)
    check_named(config)
    # The first of several processes holds the folder for all.
    is_first = os.environ.get("RANK", "0") == "0"
    with folder_lock(config.out, "train") if is_first else nullcontext():
        with loading():
            quiet()
            from draftsmith.drafters.target.sharded import leave_group
            from draftsmith.train.session import train

        train(config, callbacks)
        leave_group()
    return 0
