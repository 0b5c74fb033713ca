"""The learner over several processes, each with a device and a copy of the target of its own: they share the rows of every batch.

Rank 0 is the daemon, and alone has an optimizer and a state. Before a step it sends the draft's weights, after it the gradients
are summed onto it. That is what an all-reduce moves, too, and nobody else has anything to save, restore or fall out of step with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from draftsmith.distill.adapters import adapt
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.gradients import OwnGradients, total_weight
from draftsmith.distill.place import load_target
from draftsmith.drafters import checkpoint
from draftsmith.drafters.ranks import LEADER, Channel, in_step, join, leave_signals_to_the_leader, meeting
from draftsmith.train.objective import StepSums
from draftsmith.train.roles import Row
from draftsmith.train.run import leave_group


class Begin(NamedTuple):
    """Read target and draft."""


class Shares(NamedTuple):
    parts: list[list[Row]]  # of each rank
    weight: float  # of all rows


class Stop(NamedTuple):
    pass


class SharedGradients:
    """Rank 0's side."""

    def __init__(self, own: OwnGradients, channel: Channel):
        self.own, self.channel = own, channel
        with in_step():
            channel.tell(Begin())

    def add(self, drafter: torch.nn.Module, rows: Sequence[Row]) -> StepSums:
        shares = Shares(parts_of(rows, dist.get_world_size()), total_weight(rows))
        with in_step():
            self.channel.tell(shares)
            return add_together(self.own, drafter, shares)


class Worker(NamedTuple):
    """What the other ranks hold."""

    drafter: torch.nn.Module  # of the shape that rank 0's learners have, adapters included; its weights are sent
    own: OwnGradients

    @classmethod
    def of(cls, config: DistillConfig) -> Worker:
        target = load_target(config.target, dtype=config.dtype, device=config.device)
        drafter = checkpoint.load(config.draft, target, dtype=torch.float32)
        if config.learn.lora is not None:
            adapt(drafter, config.learn.lora, seed=config.seed)
        return cls(drafter, OwnGradients(target, config.learn))


class Crew(NamedTuple):
    rank: int
    channel: Channel


@contextmanager
def joined(device: torch.device) -> Iterator[Crew | None]:
    """To the other processes that torchrun started; None where there are none. They are told to stop when rank 0 leaves."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    join(device)
    crew = Crew(dist.get_rank(), Channel())
    try:
        yield crew
    finally:
        with in_step():
            if crew.rank == LEADER:
                crew.channel.tell(Stop())
            leave_group()


def follow(channel: Channel, config: DistillConfig) -> None:
    """What every rank but 0 does, until told to stop."""
    leave_signals_to_the_leader()
    with in_step():
        worker: Worker | None = None
        while True:
            match channel.hear(torch.device("cpu")):
                case Begin():
                    worker = Worker.of(config)
                case Shares() as shares:
                    assert worker is not None
                    worker.drafter.zero_grad(set_to_none=True)
                    add_together(worker.own, worker.drafter, shares)
                case Stop():
                    return


def parts_of(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Like lengths to all, and to everybody a row at least, one that counts nothing where there are too few."""
    by_length = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    idle = Row(by_length[-1].tokens, np.zeros_like(by_length[-1].weights))
    return [by_length[rank::size] or [idle] for rank in range(size)]


def add_together(own: OwnGradients, drafter: torch.nn.Module, shares: Shares) -> StepSums:
    """Every rank's call. Rank 0 has the gradient of all rows, and the sums, when it returns."""
    with meeting():
        for values in drafter.state_dict().values():
            dist.broadcast(values, src=LEADER)
    sums = own.add_share(drafter, shares.parts[dist.get_rank()], shares.weight)
    with meeting():
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.reduce(parameter.grad, dst=LEADER)
        for values in sums:
            dist.reduce(values, dst=LEADER)
    return sums
