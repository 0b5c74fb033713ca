"""Calls that rank 0 makes together with the ranks that share its target, as numbers of a fixed
layout: `[kind, sizes of the parts ..., the parts one after another]`, all int64."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch

from draftsmith.kernels.attention.pool import TreeLayout


class NewPool(NamedTuple):
    num_blocks: int
    block_size: int


class Pass(NamedTuple):
    input_ids: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    block_tables: torch.Tensor  # [B, blocks]
    lengths: torch.Tensor  # [B]
    tree: TreeLayout | None
    logit_rows: torch.Tensor  # [R]
    taps: tuple[int, ...]


class Move(NamedTuple):
    sources: torch.Tensor  # [n]
    slots: torch.Tensor  # [n]


class Stop(NamedTuple):
    pass


Call = NewPool | Pass | Move | Stop
KINDS: tuple[type[Call], ...] = (NewPool, Pass, Move, Stop)


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
    if kind is NewPool:
        return NewPool(*body.tolist())
    if kind is Stop:
        return Stop()
    if kind is Move:
        sources, slots = body.to(device).split(sizes)
        return Move(sources, slots)
    taps = tuple(body[: sizes[0]].tolist())
    ids, positions, tables, lengths, rows, *tree = body[sizes[0] :].to(device).split(sizes[1:])
    return Pass(
        ids[None],
        positions[None],
        tables.view(len(lengths), -1),
        lengths,
        TreeLayout(*tree) if len(tree[0]) else None,
        rows,
        taps,
    )


_NUM_PARTS: dict[type[Call], int] = {NewPool: 1, Pass: 9, Move: 2, Stop: 0}


def _parts(call: Call) -> Iterable[torch.Tensor | tuple[int, ...]]:
    """Numbers of the host first."""
    match call:
        case Pass():
            none = call.lengths[:0]
            tree = (none, none, none) if call.tree is None else call.tree
            return (
                call.taps,
                call.input_ids,
                call.positions,
                call.block_tables,
                call.lengths,
                call.logit_rows,
                *tree,
            )
        case NewPool():
            return ((call.num_blocks, call.block_size),)
        case Move():
            return call
        case Stop():
            return ()


def _flat(part: torch.Tensor | tuple[int, ...]) -> torch.Tensor | tuple[int, ...]:
    return part.flatten() if isinstance(part, torch.Tensor) else part
