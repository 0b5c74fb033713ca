"""Drafting a chain one token at a time: what drafters that read their own drafts (feature heads,
draft LMs) share.

R rows that draft, H hidden width, T ragged positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from draftsmith.drafters.autoregressive.drawing import Depth, Drawing
from draftsmith.drafters.autoregressive.state import CatchUp, Front, ReadsOwnDrafts
from draftsmith.drafters.interface import DraftInputs
from draftsmith.kernels.attention.paged import PagedPass

if TYPE_CHECKING:
    from draftsmith.drafters.autoregressive.chain_graphs import ChainGraphs


def draft_chain(
    drafter: ReadsOwnDrafts,
    inputs: DraftInputs,
    caught: CatchUp,
    drawing: Drawing,
    graphs: ChainGraphs | None,
) -> None:
    """Every row that has caught up drafts as many tokens as it may, into `drawing`."""
    depths = drawing.depths(caught.indices)
    if not depths:
        return
    _, positions, tables, step = caught
    if depths[0].kept is not None:
        positions, tables, step = (
            positions[depths[0].kept],
            tables[depths[0].kept],
            step.select(depths[0].kept),
        )
    tokens = drawing.draw(
        depths[0].rows, 0, drafter.draft_logits(step.head_input), positions + drafter.ahead
    )
    front = Front(tokens, step.next_hidden, positions, tables)
    # What a request asks of its distribution beyond filters is worked out on the host.
    if (
        graphs is None
        or inputs.adjust is not None
        or not graphs.draft(front, inputs, drawing, depths[1:])
    ):
        _draft_eagerly(drafter, inputs, front, drawing, depths[1:])


def _draft_eagerly(
    drafter: ReadsOwnDrafts,
    inputs: DraftInputs,
    front: Front,
    drawing: Drawing,
    depths: list[Depth],
) -> None:
    ones = torch.ones_like(front.tokens)
    for depth, (rows, kept, _) in enumerate(depths, start=1):
        if kept is not None:
            front = front.select(kept)
        positions = front.positions + 1
        context = PagedPass(inputs.pool, front.tables, positions, ones[: len(rows)])
        step = drafter.read_drafts(front.tokens, front.hidden, positions, context)
        tokens = drawing.draw(
            rows, depth, drafter.draft_logits(step.head_input), positions + drafter.ahead
        )
        front = Front(tokens, step.next_hidden, positions, front.tables)
