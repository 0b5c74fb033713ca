"""Draft trees of given choices, from heads that draft every depth by itself (Medusa).

The shape is given, the tokens are the likeliest of each depth: nothing is drawn, so a node is kept
with the target's own chance of its token. Legend: R rows that can draft, W parents of a level, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.tree_shape import FixedTree
from draftsmith.drafters.trees.candidates import Parents, TreeDistributions
from draftsmith.drafters.trees.nodes import TreeNodes


class _Level(NamedTuple):
    """Nodes of one depth, level after level numbered through."""

    parents: list[int]  # -1: the root
    ranks: list[int]  # among the likeliest tokens of the depth
    places: list[int]  # among the choices, best first


def levels_of(shape: FixedTree, max_depth: int) -> list[_Level]:
    """Levels of the tree down to `max_depth`."""
    numbers: dict[tuple[int, ...], int] = {(): -1}
    levels = []
    for depth in range(1, min(shape.depth, max_depth) + 1):
        level = _Level([], [], [])
        for place, path in enumerate(shape.choices):
            if len(path) == depth:
                numbers[path] = len(numbers) - 1
                level.parents.append(numbers[path[:-1]])
                level.ranks.append(path[-1])
                level.places.append(place)
        levels.append(level)
    return levels


def choose_fixed(
    inputs: DraftInputs,
    rows: torch.Tensor,
    logits_at: Callable[[int], torch.Tensor],
    shape: FixedTree,
    *,
    vocab_size: int,
    max_depth: int,
) -> Proposal:
    """Propose the tree for `rows` [R] of the batch, no more than its first `num_draft` choices.

    Args:
        logits_at: raw draft logits [R, V] of a depth.
        max_depth: tokens that the drafter can draft; deeper choices are left out.
    """
    device = rows.device
    nodes = TreeNodes(len(rows), device)
    distributions = TreeDistributions(inputs, rows, vocab_size=vocab_size, vocab_map=None)
    has_mass = torch.ones(len(rows), dtype=torch.bool, device=device)
    for depth, level in enumerate(levels_of(shape, max_depth)):
        # Drafts of a depth do not depend on those above it, unless a request's penalties and masks
        # do.
        owners = sorted({*level.parents}) if inputs.adjust is not None else [-1]
        slots = [owners.index(one) if inputs.adjust is not None else 0 for one in level.parents]
        at = torch.tensor(owners, device=device).expand(len(rows), -1)
        logits = logits_at(depth)[:, None].expand(-1, len(owners), -1)
        children = distributions.likeliest(
            Parents(logits, nodes, at, torch.ones_like(at, dtype=torch.bool)), 1 + max(level.ranks)
        )
        has_mass &= (children.logprobs[..., 0] > -torch.inf).all(dim=1)
        chosen = children.tokens[:, slots, level.ranks]
        parents, ranks = (
            torch.tensor(values, device=device).expand(len(rows), -1)
            for values in (level.parents, [-place for place in level.places])
        )
        nodes.add(chosen, parents, ranks.float())
    budgets = inputs.num_draft.to(device)[rows].clamp(max=nodes.count)
    kept = nodes.best(budgets, int(budgets.max()))
    q_rows = torch.full((len(rows), kept.count + 1), -1, dtype=torch.int64, device=device)
    return kept.proposal(inputs, rows, None, q_rows, has_mass)
