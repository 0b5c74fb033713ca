"""Drafting a chain one token at a time: what drafters that read their own drafts (feature heads, draft LMs) share.

R rows that draft, H hidden width, T ragged positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from draftsmith.drafters.autoregressive.drawing import Depth, Drawing
from draftsmith.drafters.interface import DraftInputs
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.kernels.attention.paged import PagedPass

if TYPE_CHECKING:
    from draftsmith.drafters.autoregressive.chain_graphs import ChainGraphs


class HeadStep(NamedTuple):
    next_hidden: torch.Tensor  # [..., H], taken for the state at the next position
    head_input: torch.Tensor  # [..., H], what the draft head multiplies

    def select(self, chosen: torch.Tensor) -> HeadStep:
        return HeadStep(self.next_hidden[chosen], self.head_input[chosen])


class CatchUp(NamedTuple):
    """The drafter's state after all it could read of the committed text; rows without any have nothing to draft from."""

    indices: list[int]  # of the rows that can draft, ascending
    positions: torch.Tensor  # [R] their last position with a state
    tables: torch.Tensor  # [R, max_blocks]
    step: HeadStep  # [R, H]

    def select(self, chosen: torch.Tensor, indices: list[int]) -> CatchUp:
        """`chosen` [R'] of the R rows, which are `indices` of the batch."""
        return CatchUp(indices, self.positions[chosen], self.tables[chosen], self.step.select(chosen))


class ReadsOwnDrafts(Protocol):
    ahead: int  # the state at position t predicts the token at t + ahead

    @property
    def vocab_map(self) -> torch.Tensor | None: ...

    def read_drafts(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: AttentionContext
    ) -> HeadStep:
        """Drafted tokens [T], the states before them [T, H] and where they are read [T]."""
        ...

    def draft_logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """[T, H] -> raw [T, Vd]."""
        ...


def draft_chain(
    drafter: ReadsOwnDrafts, inputs: DraftInputs, caught: CatchUp, drawing: Drawing, graphs: ChainGraphs | None
) -> None:
    """Every row that has caught up drafts as many tokens as it may, into `drawing`."""
    depths = drawing.depths(caught.indices)
    if not depths:
        return
    _, positions, tables, step = caught
    if depths[0].kept is not None:
        positions, tables, step = positions[depths[0].kept], tables[depths[0].kept], step.select(depths[0].kept)
    tokens = drawing.draw(depths[0].rows, 0, drafter.draft_logits(step.head_input), positions + drafter.ahead)
    front = Front(tokens, step.next_hidden, positions, tables)
    # What a request asks of its law beyond filters is worked out on the host.
    if graphs is None or inputs.adjust is not None or not graphs.draft(front, inputs, drawing, depths[1:]):
        _draft_eagerly(drafter, inputs, front, drawing, depths[1:])


class Front(NamedTuple):
    """Where a chain stands: its newest drafted token of each row and the state that it was drawn from."""

    tokens: torch.Tensor  # [R]
    hidden: torch.Tensor  # [R, H]
    positions: torch.Tensor  # [R] of the state
    tables: torch.Tensor  # [R, max_blocks]

    def select(self, chosen: torch.Tensor) -> Front:
        return Front(*(part[chosen] for part in self))


def _draft_eagerly(drafter: ReadsOwnDrafts, inputs: DraftInputs, front: Front, drawing: Drawing, depths: list[Depth]) -> None:
    ones = torch.ones_like(front.tokens)
    for depth, (rows, kept, _) in enumerate(depths, start=1):
        if kept is not None:
            front = front.select(kept)
        positions = front.positions + 1
        context = PagedPass(inputs.pool, front.tables, positions, ones[: len(rows)])
        step = drafter.read_drafts(front.tokens, front.hidden, positions, context)
        tokens = drawing.draw(rows, depth, drafter.draft_logits(step.head_input), positions + drafter.ahead)
        front = Front(tokens, step.next_hidden, positions, front.tables)
