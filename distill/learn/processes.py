"""Processes of one learner, on devices of their own: all of them read texts with the target, the
first one does all else.

Each text is read by one process alone, in a pass of its own, and its states are those that a single
process computes. The draft, the buffer, the saved state and all decisions are the first process's;
the others keep nothing, so a kill loses what it would lose of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.learn.teachers import open_target
from draftsmith.distill.learn.text_states import Read, TextState, read_one
from draftsmith.drafters.target.device import device_of
from draftsmith.drafters.target.load import load_config
from draftsmith.drafters.target.ranks import (
    LEADER,
    Channel,
    in_step,
    join,
    leave_group,
    leave_signals_to_the_leader,
    started,
)
from draftsmith.drafters.target.sharded import check_offload, check_shares
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError


class Open(NamedTuple):
    folder: str


class TextsCall(NamedTuple):
    ids: torch.Tensor  # [B, L]
    lengths: torch.Tensor  # [B]
    taps: tuple[int, ...]

    def of(self, rank: int, size: int) -> list[torch.Tensor]:
        """Token ids [n] of the texts that a process reads."""
        mine = zip(self.ids[rank::size], self.lengths[rank::size].tolist(), strict=True)
        return [row[:length] for row, length in mine]


class StopCall(NamedTuple):
    pass


class OneProcess:
    """A learner that reads every text itself."""

    def open(self, config: DistillConfig, folder: str) -> tuple[Target, Read | None]:
        """The target in `folder`, and what reads texts with it in place of passes one after
        another."""
        return open_target(config, folder), None

    def stop(self) -> None:
        """No other process waits."""


class FirstProcess(OneProcess):
    """A learner whose target is run by all processes of a launcher."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def open(self, config: DistillConfig, folder: str) -> tuple[Target, Read | None]:
        if config.target_shares > 1:
            # A wrong folder is an error for the user, before a process waits.
            load_config(folder, trust_remote_code=config.trust_remote_code)
            with in_step():
                self.channel.send(Open(folder))
                target = open_target(config, folder)
        else:
            # Weights that cannot be read are an error for the user: no process waits yet.
            target = open_target(config, folder)
            self.channel.send(Open(folder))
        return target, lambda texts, taps: self._read(target, config, texts, taps)

    def _read(
        self,
        target: Target,
        config: DistillConfig,
        texts: Sequence[torch.Tensor],
        taps: tuple[int, ...],
    ) -> list[TextState]:
        if not texts:
            return []
        # Texts of about one length are read at a time: no process waits long for the others.
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        ids = torch.nn.utils.rnn.pad_sequence([texts[index] for index in order], batch_first=True)
        call = TextsCall(ids, torch.tensor([len(texts[index]) for index in order]), taps)
        with in_step():
            self.channel.send(call)
            found = read_own(target, call, self.rank, self.size, config.target_shares)
            states: list[TextState | None] = [None] * len(order)
            states[:: self.size] = found
            for rank in range(1, self.size):
                for place in range(rank, len(order), self.size):
                    states[place] = self._take(rank, int(call.lengths[place]), found[0])
        by_text = dict(zip(order, states, strict=True))
        return [state for index in range(len(texts)) if (state := by_text[index]) is not None]

    def _take(self, rank: int, length: int, like: TextState) -> TextState:
        def take(part: torch.Tensor) -> torch.Tensor:
            return self.channel.take((length, part.shape[1]), part.dtype, rank)

        return TextState(None if like.taps is None else take(like.taps), take(like.hidden))

    def stop(self) -> None:
        """The other processes' `follow` returns."""
        self.channel.send(StopCall())


def read_own(target: Target, call: TextsCall, rank: int, size: int, shares: int) -> list[TextState]:
    """States of a process's own texts. Where processes share a copy of the target, each makes as
    many passes as the first: it reads a token again where it has no text left."""
    texts = [ids.to(target.device) for ids in call.of(rank, size)]
    states = [read_one(target, ids, call.taps) for ids in texts]
    if shares > 1 and len(texts) < len(call.of(0, size)):
        read_one(target, call.ids[0, :1].to(target.device), call.taps)
    return states


def follow(config: DistillConfig, channel: Channel) -> None:
    """Reads texts for the first process until it stops. A failure ends this process, and the
    launcher all others."""
    leave_signals_to_the_leader()
    target: Target | None = None
    with in_step():
        while True:
            match channel.receive(torch.device("cpu")):
                case Open(folder):
                    target = None  # goes before the next one comes
                    target = open_target(config, folder)
                case TextsCall() as call:
                    assert target is not None
                    for state in read_own(
                        target, call, dist.get_rank(), dist.get_world_size(), config.target_shares
                    ):
                        for part in state:
                            if part is not None:
                                channel.give(part)
                case StopCall():
                    return


def joined(config: DistillConfig) -> FirstProcess | None:
    """The first of the processes that were started together. Each of the others works here until
    the first one stops, and gets None."""
    join(device_of(config.device))
    channel = Channel()
    if dist.get_rank() == LEADER:
        return FirstProcess(channel)
    follow(config, channel)
    leave_group()
    return None


def check_processes(config: DistillConfig) -> None:
    """Raises `UserError` for options that several processes cannot use."""
    check_offload(config.target_offload, shares=config.target_shares, dtype=config.dtype)
    if config.target_offload is not None and config.learn.teacher == "recorded":
        raise UserError(
            f"option 'target_offload' is {config.target_offload!r}, but with "
            "learn.teacher=recorded no target is loaded; leave one of them out"
        )
    check_shares(config.target_shares, "distill")
    if config.target_shares > 1 and config.dtype == "int8":
        raise UserError(
            f"option 'target_shares' is {config.target_shares} and 'dtype' is int8, whose layers "
            "are not spread; leave one of them out"
        )
    if config.target_shares > 1 and config.learn.teacher == "recorded":
        raise UserError(
            f"option 'target_shares' is {config.target_shares}, but with learn.teacher=recorded no "
            "target is loaded that could be shared; leave one of them out"
        )
    if started() == 1:
        return
    if config.learn.teacher == "recorded":
        raise UserError(
            f"WORLD_SIZE is {started()}, but with learn.teacher=recorded no pass is made that "
            "processes could share; start the learner without a launcher"
        )
    if config.device.startswith("cuda:"):
        raise UserError(
            f"device is {config.device!r}, but WORLD_SIZE is {started()} and each process takes a "
            "device of its own; leave --device out"
        )
