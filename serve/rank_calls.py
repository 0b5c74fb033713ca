"""Calls that rank 0 makes together with the ranks that share its target, as numbers of a fixed
layout: `[kind, sizes of the parts ..., the parts one after another]`, all int64."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import chain
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from draftsmith.kernels.attention.pool import TreeLayout


class NewPool(NamedTuple):
    num_blocks: int
    block_size: int


class NewGraphs(NamedTuple):
    """CUDA graphs of passes over the pool; as the arguments of `PassGraphs`."""

    max_batch: int
    max_blocks: int
    per_row: int
    has_trees: bool
    taps: tuple[int, ...]


class Prepare(NamedTuple):
    """Capture of a shape."""

    num_rows: int
    num_tokens: int


class Pass(NamedTuple):
    input_ids: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    block_tables: torch.Tensor  # [B, blocks]
    lengths: torch.Tensor  # [B]
    tree: TreeLayout | None
    logit_rows: torch.Tensor  # [R]
    taps: tuple[int, ...]
    by_graph: bool = False  # of the shape that it fits into, with logits of every token


class MoveCall(NamedTuple):
    sources: torch.Tensor  # [n]
    slots: torch.Tensor  # [n]


class WholePass(NamedTuple):
    """A pass over whole texts, without the pool."""

    input_ids: torch.Tensor  # [B, L]
    segments: torch.Tensor | None  # [B, L]
    taps: tuple[int, ...]


class StopRanks(NamedTuple):
    pass


Call = NewPool | NewGraphs | Prepare | Pass | MoveCall | WholePass | StopRanks
KINDS: tuple[type[Call], ...] = (
    NewPool,
    NewGraphs,
    Prepare,
    Pass,
    MoveCall,
    WholePass,
    StopRanks,
)


@runtime_checkable
class Ranks(Protocol):
    """The ranks that share a target, as one of them sees the others. Rank 0's target is one."""

    def together(self, call: Call) -> AbstractContextManager[None]:
        """Around work that all ranks do; rank 0 sends the call first."""
        ...

    def least(self, value: int) -> int:
        """The least of all ranks' values, which each gives at the same point."""
        ...


def numbers_of(call: Call) -> torch.Tensor:
    """[n] int64 on the host. What lies on a device is put together there, so that it comes in one
    copy."""
    parts = [_flat(part) for part in _parts(call)]
    header = [KINDS.index(type(call)), *map(len, parts)]
    given = [part for part in parts if isinstance(part, torch.Tensor)]
    own = list(chain.from_iterable(part for part in parts if not isinstance(part, torch.Tensor)))
    host = torch.tensor(header + own, dtype=torch.int64)
    return torch.cat([host, torch.cat(given).cpu()]) if given else host


def call_of(numbers: torch.Tensor, device: torch.device) -> Call:
    """The call with its tensors on `device`, to which they come in one copy."""
    kind = KINDS[int(numbers[0])]
    num_parts = _NUM_PARTS[kind]
    sizes: list[int] = numbers[1 : 1 + num_parts].tolist()
    body = numbers[1 + num_parts :]
    if kind in (NewPool, Prepare):
        return kind(*body.tolist())
    if kind is NewGraphs:
        max_batch, max_blocks, per_row, has_trees, *taps = body.tolist()
        return NewGraphs(max_batch, max_blocks, per_row, bool(has_trees), tuple(taps))
    if kind is StopRanks:
        return StopRanks()
    if kind is MoveCall:
        sources, slots = body.to(device).split(sizes)
        return MoveCall(sources, slots)
    if kind is WholePass:
        width, *taps = body[: sizes[0]].tolist()
        ids, segments = body[sizes[0] :].to(device).split(sizes[1:])
        packed = segments.view(-1, width) if len(segments) else None
        return WholePass(ids.view(-1, width), packed, tuple(taps))
    by_graph, *taps = body[: sizes[0]].tolist()
    if by_graph:
        device = numbers.device  # the graph's inputs take them from there
    ids, positions, tables, lengths, rows, *tree = body[sizes[0] :].to(device).split(sizes[1:])
    return Pass(
        ids[None],
        positions[None],
        tables.view(len(lengths), -1),
        lengths,
        TreeLayout(*tree) if len(tree[0]) else None,
        rows,
        tuple(taps),
        bool(by_graph),
    )


_NUM_PARTS: dict[type[Call], int] = {
    NewPool: 1,
    NewGraphs: 1,
    Prepare: 1,
    Pass: 9,
    MoveCall: 2,
    WholePass: 3,
    StopRanks: 0,
}


def _parts(call: Call) -> Iterable[torch.Tensor | tuple[int, ...]]:
    """Numbers of the host first."""
    match call:
        case Pass():
            none = call.lengths[:0]
            tree = (none, none, none) if call.tree is None else call.tree
            return (
                (int(call.by_graph), *call.taps),
                call.input_ids,
                call.positions,
                call.block_tables,
                call.lengths,
                call.logit_rows,
                *tree,
            )
        case NewGraphs():
            return ((*call[:3], int(call.has_trees), *call.taps),)
        case NewPool() | Prepare():
            return (tuple(call),)
        case WholePass():
            ids = call.input_ids
            segments = ids.flatten()[:0] if call.segments is None else call.segments
            return ((ids.shape[1], *call.taps), ids, segments)
        case MoveCall():
            return call
        case StopRanks():
            return ()


def _flat(part: torch.Tensor | tuple[int, ...]) -> torch.Tensor | tuple[int, ...]:
    return part.flatten() if isinstance(part, torch.Tensor) else part
