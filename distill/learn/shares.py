"""The rows of a batch shared out among ranks, and what the ranks send each other for a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from draftsmith.distill.learn.gradients import OwnGradients, total_weight
from draftsmith.drafters.target.ranks import LEADER, meeting
from draftsmith.train.data.roles import Row
from draftsmith.train.objective.unrolled_loss import StepSums


class Shares(NamedTuple):
    parts: list[list[Row]]  # of each rank
    weight: float  # of all rows

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Shares:
        return cls(parts_of(rows, dist.get_world_size()), total_weight(rows))

    @property
    def own(self) -> list[Row]:
        return self.parts[dist.get_rank()]


def parts_of(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Like lengths to all, and to everybody a row at least, one that counts nothing where there are
    too few."""
    by_length = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    idle = Row(by_length[-1].tokens, np.zeros_like(by_length[-1].weights))
    return [by_length[rank::size] or [idle] for rank in range(size)]


def add_together(own: OwnGradients, drafter: torch.nn.Module, shares: Shares) -> StepSums:
    """Every rank's call. Rank 0 has the gradient of all rows, and the sums, when it returns."""
    send_weights(drafter)
    sums = own.add_share(drafter, shares.own, shares.weight)
    with meeting():
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.grad = (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
                dist.reduce(parameter.grad, dst=LEADER)
    add_up(sums)
    return sums


def send_weights(drafter: torch.nn.Module) -> None:
    """Rank 0's."""
    with meeting():
        for values in drafter.state_dict().values():
            dist.broadcast(values, src=LEADER)


def add_up(sums: StepSums) -> None:
    """On rank 0."""
    with meeting():
        for values in sums:
            dist.reduce(values, dst=LEADER)
