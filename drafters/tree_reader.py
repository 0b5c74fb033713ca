"""Reads the nodes of growing draft trees with a feature head, a level at a time, over scratch places of the draft's own pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from draftsmith.drafters.interface import DraftInputs
from draftsmith.kernels.paged_attention import PagedPass, TreeLayout

if TYPE_CHECKING:
    from draftsmith.drafters.heads import CatchUp, FeatureHead


class Level(NamedTuple):
    """What the head says after the nodes of one level; W nodes for each of R rows, arbitrary where a node is not alive."""

    next_hidden: torch.Tensor  # [R, W, H]
    logits: torch.Tensor  # [R, W, Vd] raw
    bits: torch.Tensor  # [R, W] int64, which read nodes a node sees, itself included


class TreeReader:
    """The i-th node read of a row keeps its keys at place n + i, n being the row's newest committed token, which has no state.

    The engine has reserved a place for every token it may be offered there; what is left behind is overwritten by true states.
    """

    def __init__(self, head: FeatureHead, inputs: DraftInputs, caught: CatchUp):
        self.head, self.pool, self.tables = head, inputs.pool, inputs.block_tables[caught.rows]
        self.first = caught.positions + 1
        self.used = torch.zeros_like(self.first)
        step = caught.step
        self.root = Level(
            step.next_hidden[:, None], head.draft_logits(step.head_input)[:, None], torch.zeros_like(self.first)[:, None]
        )

    def read(self, tokens: torch.Tensor, hidden: torch.Tensor, bits: torch.Tensor, alive: torch.Tensor, depth: int) -> Level:
        """tokens [R, W] at `depth` below the root (0: its children); states [R, W, H] and bits [R, W] of the nodes above."""
        index = self.used[:, None] + alive.cumsum(dim=1) - 1
        bits = torch.where(alive, bits | (1 << index.clamp(min=0)), 0)
        counts = alive.sum(dim=1)
        reading = counts > 0
        self.used = self.used + counts
        first = self.first[:, None].expand_as(tokens)
        positions = (first + depth)[alive]
        layout = TreeLayout(places=(first + index)[alive], ancestors=bits[alive], first=first[alive])
        context = PagedPass(self.pool, self.tables[reading], positions, counts[reading], tree=layout)
        step = self.head.read_ragged(self.head.embed(tokens[alive]), hidden[alive], positions, context)
        logits = self.head.draft_logits(step.head_input)
        return Level(_spread(step.next_hidden, alive), _spread(logits, alive), bits)


def _spread(values: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """[T, n] of the alive nodes -> [R, W, n]."""
    if bool(alive.all()):
        return values.unflatten(0, alive.shape)
    spread = values.new_zeros(*alive.shape, values.shape[-1])
    spread[alive] = values
    return spread
