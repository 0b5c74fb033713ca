"""The learner over several processes, each with a device and a copy of the target of its own: they
share the rows of every batch.

Rank 0 is the daemon, and alone has a state. Unless DeepSpeed parts it (`zero.py`), the optimizer
too: before a step it sends the draft's weights, after it the gradients are summed onto it. That is
what an all-reduce moves, too, and nobody else has anything to save, restore or fall out of step
with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.learn.adapters import adapt
from draftsmith.distill.learn.gradients import OwnGradients
from draftsmith.distill.learn.optimizer import NewOptimizer, WholeOptimizer
from draftsmith.distill.learn.shares import Shares, add_together
from draftsmith.distill.learn.zero import ZeroPart
from draftsmith.drafters import checkpoint
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.ranks import (
    LEADER,
    Channel,
    in_step,
    join,
    leave_group,
    leave_signals_to_the_leader,
)
from draftsmith.train.data.roles import Row
from draftsmith.train.objective.unrolled_loss import StepSums


class Begin(NamedTuple):
    """Read target and draft."""


class Open(NamedTuple):
    """A part of another candidate's optimizer."""

    candidate: int


class Call(NamedTuple):
    """Of the part of a candidate's optimizer."""

    candidate: int
    method: Callable[..., Any]  # of ZeroPart
    inputs: tuple[Any, ...]


class Close(NamedTuple):
    candidate: int


class Stop(NamedTuple):
    pass


def optimizers(config: DistillConfig, own: OwnGradients, channel: Channel | None) -> NewOptimizer:
    """Of a daemon's candidates."""
    if channel is None:
        return partial(WholeOptimizer, own, config.learn)
    with in_step():
        channel.tell(Begin())
    if config.deepspeed is None:
        return partial(WholeOptimizer, SharedGradients(own, channel), config.learn)
    candidates = count()
    return lambda drafter: SharedOptimizer(config, own, channel, next(candidates), drafter)


class SharedGradients:
    """Rank 0's side."""

    def __init__(self, own: OwnGradients, channel: Channel):
        self.own, self.channel = own, channel

    def add(self, drafter: torch.nn.Module, rows: Sequence[Row]) -> StepSums:
        shares = Shares.of(rows)
        with in_step():
            self.channel.tell(shares)
            return add_together(self.own, drafter, shares)


class SharedOptimizer:
    """Rank 0's side of one that all ranks hold parts of."""

    def __init__(
        self,
        config: DistillConfig,
        own: OwnGradients,
        channel: Channel,
        candidate: int,
        drafter: torch.nn.Module,
    ):
        self.channel, self.candidate = channel, candidate
        with in_step():
            channel.tell(Open(candidate))
            self.part = ZeroPart(own, drafter, config.learn, config.deepspeed)

    def _call(self, method: Callable[..., Any], *inputs: Any) -> Any:
        with in_step():
            self.channel.tell(Call(self.candidate, method, inputs))
            return method(self.part, *inputs)

    def step(self, rows: Sequence[Row], *, lr: float) -> StepSums | None:
        return self._call(ZeroPart.step, Shares.of(rows), lr)

    def moments(self) -> dict[str, torch.Tensor]:
        return self._call(ZeroPart.moments)

    def fill(self, moments: Mapping[str, torch.Tensor]) -> None:
        self._call(ZeroPart.fill, dict(moments))

    def forget(self) -> None:
        self._call(ZeroPart.forget)

    def close(self) -> None:
        with in_step():
            self.channel.tell(Close(self.candidate))
            self.part.close()


class Worker:
    """What the other ranks hold. Drafts are of the shape that rank 0's candidates have; their
    weights are sent."""

    def __init__(self, config: DistillConfig):
        self.config = config
        target = load_target(
            config.target,
            dtype=config.dtype,
            device=config.device,
            trust_remote_code=config.trust_remote_code,
        )
        self.own = OwnGradients(target, config.learn)
        self.parts: dict[int, ZeroPart] = {}

    def new_drafter(self) -> torch.nn.Module:
        drafter = checkpoint.load(self.config.draft, self.own.target, dtype=torch.float32)
        if self.config.learn.lora is not None:
            adapt(drafter, self.config.learn.lora, seed=self.config.seed)
        return drafter

    @cached_property
    def drafter(self) -> torch.nn.Module:
        """For gradients."""
        return self.new_drafter()

    def answer(self, call: Shares | Open | Call | Close) -> None:
        match call:
            case Shares():
                self.drafter.zero_grad(set_to_none=True)
                add_together(self.own, self.drafter, call)
            case Open(candidate):
                self.parts[candidate] = ZeroPart(
                    self.own, self.new_drafter(), self.config.learn, self.config.deepspeed
                )
            case Call(candidate, method, inputs):
                method(self.parts[candidate], *inputs)
            case Close(candidate):
                self.parts.pop(candidate).close()


class Crew(NamedTuple):
    rank: int
    channel: Channel


@contextmanager
def joined(device: torch.device) -> Iterator[Crew | None]:
    """To the other processes that torchrun started; None where there are none. They are told to
    stop when rank 0 leaves."""
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
                    worker = Worker(config)
                case Stop():
                    return
                case call:
                    assert worker is not None
                    worker.answer(call)
