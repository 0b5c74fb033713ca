"""Processes of one launcher that write a dataset together, each with the whole target on a device
of its own. Their group is for waiting alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TypeVar

import torch.distributed as dist

from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate.answers import AnswerFolder
from draftsmith.drafters.target.ranks import LEADER, PATIENCE, Gone, leave_group, meeting, started
from draftsmith.errors import UserError

Made = TypeVar("Made")


class Processes:
    """This process among `count`; process `rank` writes the shards rank, rank + count, ..."""

    def __init__(self, rank: int = LEADER, count: int = 1):
        self.rank, self.count = rank, count

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    def shards(self, folder: AnswerFolder) -> range:
        return range(self.rank, folder.num_shards, self.count)

    def wait(self) -> None:
        """Return when all processes are here. Raises `UserError` where one has ended."""
        if self.count == 1:
            return
        try:
            with meeting():
                dist.barrier()
        except Gone as error:
            raise UserError(
                f"process {self.rank} of {self.count} ends because another one has ({error}); what "
                "was answered is kept, so start the command again once its message is dealt with"
            ) from error

    def leader_first(self, make: Callable[[], Made]) -> Made:
        """Result of `make`, called by the others when the first process has called it, and used by
        none before all have."""
        if not self.leads:
            self.wait()
        made = make()
        if self.leads:
            self.wait()
        self.wait()
        return made


@contextmanager
def joined() -> Iterator[Processes]:
    """Processes that were started together; all but the first one print nothing."""
    if (count := started()) == 1:
        yield Processes()
        return
    dist.init_process_group("gloo", timeout=PATIENCE)
    with ExitStack() as stack:
        processes = Processes(dist.get_rank(), count)
        if not processes.leads:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield processes
        processes.wait()
    leave_group()


def check_processes(config: GenerateOptions) -> None:
    """Raises `UserError` for options that several processes cannot use."""
    if started() == 1:
        return
    if config.url is not None:
        raise UserError(
            f"--url is {config.url!r}, but WORLD_SIZE is {started()} and one process asks a server "
            "for as many answers at once as --batch says; start it without a launcher"
        )
    if config.device.startswith("cuda:"):
        raise UserError(
            f"device is {config.device!r}, but WORLD_SIZE is {started()} and each process takes a "
            "device of its own; leave --device out"
        )
