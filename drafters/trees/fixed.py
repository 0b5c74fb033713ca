"""Draft trees of given choices, from heads that draft every depth by itself (Medusa).

The shape is given, the tokens are the likeliest of each depth: nothing is drawn, so a node is kept
with the target's own chance of its token. Legend: R rows that can draft, W parents of a level, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.tree_shape import FixedTree
from draftsmith.drafters.trees.candidates import Parents, TreeDistributions
from draftsmith.drafters.trees.nodes import TreeNodes


class FixedLevel(NamedTuple):
    """Nodes of one depth, on the host or on a device; levels are numbered through."""

    owners: Any  # nodes whose children are chosen apart, -1: the root
    slots: Any  # [C] index of each child's among them
    parents: Any  # [C] -1: the root
    ranks: Any  # [C] among the likeliest tokens of the depth
    places: Any  # [C] among the choices, best first


class FixedLevels(NamedTuple):
    levels: list[FixedLevel]  # of lists
    widths: list[int]  # likeliest tokens needed of each depth
    num_nodes: int

    @classmethod
    def of(cls, shape: FixedTree, max_depth: int, *, apart: bool) -> FixedLevels:
        """Levels of the tree down to `max_depth`. Drafts of a depth do not depend on those above it
        unless they are kept `apart`, for penalties and masks of a request."""
        numbers: dict[tuple[int, ...], int] = {(): -1}
        levels = []
        for depth in range(1, min(shape.depth, max_depth) + 1):
            level = FixedLevel([], [], [], [], [])
            for place, path in enumerate(shape.choices):
                if len(path) == depth:
                    numbers[path] = len(numbers) - 1
                    level.parents.append(numbers[path[:-1]])
                    level.ranks.append(path[-1])
                    level.places.append(-place)
            level.owners.extend(sorted({*level.parents}) if apart else [-1])
            level.slots.extend(level.owners.index(one) if apart else 0 for one in level.parents)
            levels.append(level)
        return cls(levels, [1 + max(level.ranks) for level in levels], len(numbers) - 1)

    def columns(self) -> list[list[int]]:
        return [column for level in self.levels for column in level]

    def on_device(self, parts: Sequence[torch.Tensor]) -> FixedLevels:
        """The same with tensors for lists; `parts` are the `columns`, on the device."""
        size = len(FixedLevel._fields)
        starts = range(0, len(parts), size)
        return self._replace(levels=[FixedLevel(*parts[at : at + size]) for at in starts])


def choose_fixed(
    distributions: TreeDistributions,
    logits_at: Callable[[int], torch.Tensor],
    tree: FixedLevels,
    budgets: torch.Tensor,
    most: int,
) -> Proposal:
    """Propose a tree on the device for the rows of `distributions`, no more than its first choices.

    Args:
        logits_at: raw draft logits [R, V] of a depth.
        budgets: [R] nodes of each row, `most` at most.
    """
    device, size = budgets.device, len(budgets)
    nodes = TreeNodes(size, device)
    has_mass = torch.ones(size, dtype=torch.bool, device=device)
    for depth, (level, width) in enumerate(zip(tree.levels, tree.widths, strict=True)):
        at = level.owners.expand(size, -1)
        logits = logits_at(depth)[:, None].expand(-1, at.shape[1], -1)
        children = distributions.likeliest(
            Parents(logits, nodes, at, torch.ones_like(at, dtype=torch.bool), depth), width
        )
        has_mass &= (children.logprobs[..., 0] > -torch.inf).all(dim=1)
        chosen = children.tokens[:, level.slots, level.ranks]
        parents, ranks = (one.expand(size, -1) for one in (level.parents, level.places))
        nodes.add(chosen, parents, ranks.float())
    kept = nodes.best(budgets.clamp(max=most), most)
    q_rows = torch.full((size, kept.count + 1), -1, dtype=torch.int64, device=device)
    return kept.proposal(distributions.inputs, distributions.rows, None, q_rows, has_mass)
