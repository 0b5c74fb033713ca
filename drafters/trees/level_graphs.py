"""CUDA graphs of the levels of draft trees: reading all nodes of a level costs one launch.

A graph is captured once for each (bucket of rows, nodes of a row) and stays valid across swaps, as
those of a chain. Surplus rows read and write the null block. Legend: R rows, W nodes of a
level, H hidden width, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftsmith.drafters.autoregressive.chain import ChainLoop
from draftsmith.drafters.autoregressive.padded_round import bucket
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool, TreeLayout
from draftsmith.kernels.constants import MAX_NODES, NULL_BLOCK
from draftsmith.kernels.cuda_graphs import GraphRoom, GraphShapes, row_buckets


class LevelInputs(NamedTuple):
    tokens: torch.Tensor  # [R, W]
    hidden: torch.Tensor  # [R, W, H] of the nodes above
    positions: torch.Tensor  # [R, W]
    layout: TreeLayout  # [R, W] each
    tables: torch.Tensor  # [R, max_blocks]


class LevelOutput(NamedTuple):
    next_hidden: torch.Tensor  # [R * W, H]
    logits: torch.Tensor  # [R * W, Vd] raw


def read_level(drafter: ChainLoop, pool: PagedPool, inputs: LevelInputs) -> LevelOutput:
    num_rows, width = inputs.tokens.shape
    lengths = torch.full((num_rows,), width, device=inputs.tokens.device)
    positions = inputs.positions.flatten()
    layout = TreeLayout(*(part.flatten() for part in inputs.layout))
    context = PagedPass(pool, inputs.tables, positions, lengths, tree=layout)
    step = drafter.read_drafts(inputs.tokens.flatten(), inputs.hidden.flatten(0, 1), context)
    return LevelOutput(step.next_hidden, drafter.draft_logits(step.head_input))


class LevelGraphs:
    """`read` gives a level from a graph, good until the next one is read, or None where it must be
    read without."""

    def __init__(self, drafter: ChainLoop, room: GraphRoom):
        assert room.pool is not None
        self.drafter, self.pool = drafter, room.pool
        self.max_blocks = room.max_blocks + spare_blocks(room.pool)
        self.rows = row_buckets(room.max_batch)
        self.shapes = GraphShapes[tuple[int, int], LevelOutput](room.capturer, "levels of trees")
        self._static: dict[tuple[int, int], LevelInputs] = {}

    def read(self, inputs: LevelInputs, pool: PagedPool) -> LevelOutput | None:
        if self.shapes.broken or pool is not self.pool:
            return None
        num_rows, width = inputs.tokens.shape
        rows = bucket(self.rows, num_rows)
        # At the end of an answer levels are narrower than those that were captured.
        wider = [
            one
            for count, one in self._static
            if count == rows and one >= width and (count, one) in self.shapes
        ]
        key = (rows, min(wider, default=width))
        if key not in self._static:
            self._static[key] = empty_level(*key, self.max_blocks, inputs.hidden)
        static = self._static[key]
        found = self.shapes.find(key, lambda: read_level(self.drafter, self.pool, static))
        if found is None:
            return None
        graph, output = found
        fill(static, widened(inputs, key[1]))
        graph.replay()
        levels = (part.unflatten(0, key) for part in output)
        return LevelOutput(*(level[:num_rows, :width].flatten(0, 1) for level in levels))


def spare_blocks(pool: PagedPool) -> int:
    """The kv indices of a whole level beyond the last that is reserved for a row."""
    return MAX_NODES // pool.block_size + 1


def empty_level(num_rows: int, width: int, max_blocks: int, hidden: torch.Tensor) -> LevelInputs:
    """Padding nodes at fixed addresses: each sees itself in the null block."""
    device, shape = hidden.device, (num_rows, width)
    tokens, positions, kv_indices, first = torch.zeros(4, *shape, dtype=torch.int64, device=device)
    ancestors = torch.full(shape, -1, device=device)
    tables = torch.full((num_rows, max_blocks), NULL_BLOCK, device=device)
    states = torch.zeros(*shape, hidden.shape[-1], dtype=hidden.dtype, device=device)
    return LevelInputs(tokens, states, positions, TreeLayout(kv_indices, ancestors, first), tables)


def widened(inputs: LevelInputs, width: int) -> LevelInputs:
    """The level with its last node again and again: what these write is what that writes."""
    missing = width - inputs.tokens.shape[1]
    if missing == 0:
        return inputs
    tokens, hidden, positions, *layout = (
        torch.cat([part, part[:, -1:].expand(-1, missing, *part.shape[2:])], dim=1)
        for part in (inputs.tokens, inputs.hidden, inputs.positions, *inputs.layout)
    )
    return LevelInputs(tokens, hidden, positions, TreeLayout(*layout), inputs.tables)


def fill(static: LevelInputs, inputs: LevelInputs) -> None:
    count, blocks = inputs.tables.shape
    static.tables.fill_(NULL_BLOCK)
    static.tables[:count, :blocks].copy_(inputs.tables)
    # What an earlier level has left in surplus rows may be NaN, which the null block must not get,
    # or far away.
    for part in (
        static.tokens,
        static.hidden,
        static.positions,
        static.layout.kv_indices,
        static.layout.first,
    ):
        part[count:].zero_()
    static.layout.ancestors[count:] = -1
    pairs = [
        (static.tokens, inputs.tokens),
        (static.hidden, inputs.hidden),
        (static.positions, inputs.positions),
    ]
    for buffer, values in (*pairs, *zip(static.layout, inputs.layout, strict=True)):
        buffer[:count].copy_(values)
