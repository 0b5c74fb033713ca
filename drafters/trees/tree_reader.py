"""Reads the nodes of growing draft trees with a feature head, a level at a time, over scratch
kv indices of the draft's own pool."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from transformers import LlamaConfig

from draftsmith.drafters.autoregressive.state import DraftPrefill, ReadsCommitted
from draftsmith.drafters.interface import DraftInputs
from draftsmith.drafters.trees.level_graphs import (
    LevelGraphs,
    LevelInputs,
    read_level,
    spare_blocks,
)
from draftsmith.kernels.attention.pool import PagedPool, TreeLayout
from draftsmith.kernels.constants import MAX_NODES, NULL_BLOCK


class TreeDrafter(ReadsCommitted, Protocol):
    """A drafter that reads all nodes of a tree's level in one pass."""

    config: LlamaConfig
    level_graphs: LevelGraphs | None


class GrownLevel(NamedTuple):
    """Head outputs at the nodes of one level, W nodes for each of R rows. Arbitrary where a node is
    not alive."""

    next_hidden: torch.Tensor  # [R, W, H]
    logits: torch.Tensor  # [R, W, Vd] raw
    bits: torch.Tensor  # [R, W] int64, which read nodes a node sees, itself included


class TreeReader:
    """Reader of a tree's nodes. The i-th node read of a row keeps its keys at kv index n + i, n
    being that of the row's newest committed token, which has no state.

    The engine has reserved an index for every token it may be offered there; what is left behind is
    overwritten by true states. A level is read whole: nodes that are not alive come last in it and
    take the indices after the others, where the next level writes over them or, beyond what is
    reserved, the null block has them.
    """

    def __init__(
        self, head: TreeDrafter, inputs: DraftInputs, prefill: DraftPrefill, budgets: torch.Tensor
    ):
        assert inputs.pool is not None
        self.head, self.pool = head, inputs.pool
        self.first = prefill.positions + 1
        self.tables = reserved(prefill.tables, self.first + budgets, self.pool)
        self.used = torch.zeros_like(self.first)
        step = prefill.step
        self.root = GrownLevel(
            step.next_hidden[:, None],
            head.draft_logits(step.head_input)[:, None],
            torch.zeros_like(self.first)[:, None],
        )

    def read(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        bits: torch.Tensor,
        alive: torch.Tensor,
        depth: int,
    ) -> GrownLevel:
        """tokens [R, W] at `depth` below the root (0: its children); states [R, W, H] and bits [R,
        W] of the nodes above.

        `alive` [R, W]: in each row, all before the first that is not.
        """
        index = self.used[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        bits = torch.where(alive, bits | (1 << index.clamp(max=MAX_NODES)), 0)
        self.used = self.used + alive.sum(dim=1)
        first = self.first[:, None].expand_as(tokens)
        # A node that is not alive may come from a state of NaN, which the null block must not get.
        states = torch.where(alive[..., None], hidden, 0.0)
        inputs = LevelInputs(
            tokens, states, first + depth, TreeLayout(first + index, bits, first), self.tables
        )
        graphs = self.head.level_graphs
        output = None if graphs is None else graphs.read(inputs, self.pool)
        if output is None:
            output = read_level(self.head, self.pool, inputs)
        hidden, logits = (part.unflatten(0, tokens.shape) for part in output)
        return GrownLevel(hidden, logits, bits)


def reserved(tables: torch.Tensor, last: torch.Tensor, pool: PagedPool) -> torch.Tensor:
    """Block tables [R, n] with the null block for all kv indices after `last` [R], and enough of it
    for a whole level more."""
    tables = torch.nn.functional.pad(tables, (0, spare_blocks(pool)), value=NULL_BLOCK)
    begins = torch.arange(tables.shape[1], device=tables.device) * pool.block_size
    return torch.where(begins <= last[:, None], tables, NULL_BLOCK)
