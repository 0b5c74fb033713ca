"""Tensor parallelism of the target: transformers' own plan shards it, rank 0 serves, the other
ranks run its passes along.

Every pass of the target is the same call on every rank, so rank 0 sends each call to the others
first: one message of numbers a round, over gloo whatever the weights' own backend is. The draft is
whole on rank 0 alone, and so is the target's embedding, which drafts read at every step.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from draftsmith.drafters.target import sharded
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.drafters.target.causal_lm import States, whole
from draftsmith.drafters.target.sharded import Channel, in_step, leave_signals_to_the_leader
from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.cuda_graphs import Capturer, CudaCapturer, Shape
from draftsmith.serve.engine.graphs import PassGraphs, PassInputs
from draftsmith.serve.rank_calls import (
    Call,
    MoveCall,
    NewGraphs,
    NewPool,
    Pass,
    Prepare,
    StopRanks,
    WholePass,
    call_of,
    numbers_of,
)


class LeadingPool(PagedPool):
    """Rank 0's share of keys and values; what is moved here is moved on every rank."""

    _send: Callable[[Call], None]

    def attach(self, send: Callable[[Call], None]) -> LeadingPool:
        object.__setattr__(self, "_send", send)
        return self

    def move_slots(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        with in_step():
            self._send(MoveCall(sources, slots))
            super().move_slots(sources, slots)


class LeadingTarget(Target):
    """The target as rank 0 serves it: calls that run its sharded weights are sent to the others
    first."""

    # none yet while the model is probed, which every rank does by itself
    _channel: Channel | None = None
    _embedding: torch.nn.Module | None = None  # whole

    def lead(self, channel: Channel) -> LeadingTarget:
        with in_step():
            self._embedding = whole_embedding(self)
        self._channel = channel
        return self

    def least(self, value: int) -> int:
        return value if self._channel is None else self._channel.least(value)

    @contextmanager
    def together(self, call: Call) -> Iterator[None]:
        if self._channel is None:
            yield
            return
        with in_step():
            self._channel.send_numbers(numbers_of(call))
            yield

    def _send(self, call: Call) -> None:
        if self._channel is not None:
            self._channel.send_numbers(numbers_of(call))

    def new_pool(
        self, num_blocks: int, block_size: int, device: Any = None, dtype: Any = None
    ) -> PagedPool:
        # A pool that does not fit is an error for the user: no rank waits for another here.
        self._send(NewPool(num_blocks, block_size))
        pool = super().new_pool(num_blocks, block_size, device, dtype)
        return LeadingPool(pool.keys, pool.values, pool.block_size).attach(self._send)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention_context: AttentionContext,
        logit_rows: torch.Tensor,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        assert isinstance(attention_context, PagedPass)
        layout = attention_context.layout
        with self.together(
            Pass(
                input_ids,
                positions,
                layout.block_tables,
                layout.lengths,
                layout.tree,
                logit_rows,
                tuple(taps),
            )
        ):
            return super().forward(input_ids, positions, attention_context, logit_rows, taps)

    def full(
        self,
        input_ids: torch.Tensor,
        taps: Sequence[int] = (),
        segments: torch.Tensor | None = None,
    ) -> States:
        with self.together(WholePass(input_ids, segments, tuple(taps))):
            return super().full(input_ids, taps, segments)

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids) if self._embedding is None else self._embedding(ids)

    def stop(self) -> None:
        """The other ranks' `follow` returns."""
        self._send(StopRanks())


def whole_embedding(target: Target) -> torch.nn.Module:
    """The target's embedding with all its rows, which every rank must ask for. It scales what it
    reads as the model's own does."""
    embedding = copy.copy(target.model.get_input_embeddings())
    table = whole(embedding.weight.detach())
    # Sharding has put a forward of its own in front of the class's.
    vars(embedding).pop("forward", None)
    embedding._parameters = {"weight": torch.nn.Parameter(table, requires_grad=False)}
    return embedding


class Following:
    """The other ranks as one that follows sees them: it sends no calls."""

    def __init__(self, channel: Channel):
        self._channel = channel

    @contextmanager
    def together(self, call: Call) -> Iterator[None]:
        yield

    def least(self, value: int) -> int:
        return self._channel.least(value)


MakeCapturer = Callable[[torch.device], Capturer]


def follow(target: Target, channel: Channel, make_capturer: MakeCapturer = CudaCapturer) -> None:
    """Makes rank 0's calls on another rank until `StopRanks` arrives. A failure ends this process,
    and torchrun all others."""
    leave_signals_to_the_leader()
    with in_step():
        whole_embedding(target)  # which takes all ranks; rank 0 keeps it
        _follow(target, channel, make_capturer)


def _follow(target: Target, channel: Channel, make_capturer: MakeCapturer) -> None:
    pool: PagedPool | None = None
    graphs: PassGraphs | None = None
    while True:
        call = call_of(channel.receive_numbers(), target.device)
        match call:
            case NewPool():
                pool = target.new_pool(call.num_blocks, call.block_size)
            case NewGraphs():
                assert pool is not None
                graphs = PassGraphs(
                    target,
                    pool,
                    capturer=make_capturer(target.device),
                    ranks=Following(channel),
                    **call._asdict(),
                )
            case Prepare():
                assert graphs is not None
                graphs.prepare(Shape(*call))
            case Pass(by_graph=True):
                assert graphs is not None
                graphs.run(inputs_of(call), ())
            case Pass():
                assert pool is not None
                context = PagedPass(
                    pool, call.block_tables, call.positions[0], call.lengths, tree=call.tree
                )
                target.forward(call.input_ids, call.positions, context, call.logit_rows, call.taps)
            case MoveCall():
                assert pool is not None
                pool.move_slots(call.sources, call.slots)
            case WholePass():
                with torch.no_grad():
                    target.full(call.input_ids, call.taps, call.segments)
            case StopRanks():
                return


def inputs_of(call: Pass) -> PassInputs:
    """Inputs of a pass in which every token decides."""
    ids, positions = call.input_ids[0].tolist(), call.positions[0].tolist()
    rows = list(range(len(ids)))
    return PassInputs(ids, positions, call.lengths.tolist(), rows, call.block_tables, call.tree)


class RankPlace(NamedTuple):
    rank: int
    size: int
    device: str


def join(size: int, device: str) -> RankPlace:
    """Joins the `size` processes started together, each with a device of its own; `UserError` when
    they are not so many."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != size:
        raise UserError(
            f"tensor_parallel is {size} but {started} "
            f"process{'es run' if started > 1 else ' runs'}; start the server without "
            f"torchrun, or with `torchrun --nproc-per-node {size} -m draftsmith.cli serve ...`"
        )
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    sharded.join(torch.device(device))
    return RankPlace(dist.get_rank(), size, device)
