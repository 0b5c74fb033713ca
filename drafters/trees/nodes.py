"""The nodes of growing draft trees, one table for all rows, the proposal made of
them, and their positions in a target pass: each row's known tokens, then its nodes.

Legend: B rows, N nodes, T tokens of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.kernels.attention.pool import TreeLayout
from draftsmith.kernels.verify.verdict import DraftTree, ancestors, depths


class TreeNodes:
    """C nodes so far for each of R rows, in order of creation: a node's parent comes before it."""

    def __init__(self, num_rows: int, device: torch.device):
        # [R, C] target ids
        self.tokens = torch.empty(num_rows, 0, dtype=torch.int64, device=device)
        # [R, C], -1: the root
        self.parents = torch.empty(num_rows, 0, dtype=torch.int64, device=device)
        # [R, C], higher is better; -inf: no node
        self.ranks = torch.empty(num_rows, 0, dtype=torch.float32, device=device)

    def add(self, tokens: torch.Tensor, parents: torch.Tensor, ranks: torch.Tensor) -> None:
        """[R, n] each."""
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self.ranks = torch.cat([self.ranks, ranks], dim=1)

    @property
    def count(self) -> int:
        return self.tokens.shape[1]

    def prefixes(self, nodes: torch.Tensor, depth: int) -> torch.Tensor:
        """[R, W, depth] tokens from the root to each of `nodes` [R, W], its own included, in order
        behind as many -1 as a node is less deep; -1 alone for the root, -1."""
        tokens, parents = (
            torch.nn.functional.pad(part, (1, 0), value=-1) for part in (self.tokens, self.parents)
        )
        path: list[torch.Tensor] = []
        for _ in range(depth):
            slots = nodes + 1
            path.insert(0, tokens.gather(1, slots))
            nodes = parents.gather(1, slots)
        return torch.stack(path, dim=2) if path else tokens.new_empty(*nodes.shape, 0)

    def best(self, budgets: torch.Tensor, most: int) -> TreeNodes:
        """The `budgets` [R] (<= most) best nodes of each row, still in order of creation, the
        others left out.

        No node ranks above its parent, and of equals the elder comes first: so parents are never
        left out alone.
        """
        order = self.ranks.argsort(dim=1, descending=True, stable=True)[:, :most]
        wanted = torch.arange(order.shape[1], device=order.device) < budgets[:, None]
        wanted &= self.ranks.gather(1, order) > -torch.inf
        kept = torch.zeros_like(self.ranks, dtype=torch.bool).scatter(1, order, wanted)
        # Where each node goes; the others to a column that is cut off.
        width = order.shape[1]
        places = torch.where(kept, kept.cumsum(dim=1) - 1, width)
        best = TreeNodes(len(budgets), order.device)
        moved = torch.where(self.parents < 0, -1, places.gather(1, self.parents.clamp(min=0)))
        best.add(
            _put(places, self.tokens, width, 0),
            _put(places, moved, width, -1),
            _put(places, self.ranks, width, -torch.inf),
        )
        return best

    def proposal(
        self,
        inputs: DraftInputs,
        rows: torch.Tensor,
        logits: torch.Tensor | None,
        q_rows: torch.Tensor,
        has_mass: torch.Tensor,
    ) -> Proposal:
        """Proposal in which rows [R] of the batch get these nodes and the others none; q_rows [R, C
        + 1]. `has_mass` [R]: all their distributions had mass."""
        size = len(inputs.num_draft)
        tokens, parents = (
            torch.full((size, self.count), -1, dtype=torch.int64, device=rows.device)
            for _ in range(2)
        )
        distributions = torch.full(
            (size, self.count + 1), -1, dtype=torch.int64, device=rows.device
        )
        lengths = torch.zeros(size, dtype=torch.int64, device=rows.device)
        whole = torch.ones(size, self.count, dtype=torch.bool, device=rows.device)
        real = self.ranks > -torch.inf
        tokens[rows] = torch.where(real, self.tokens, -1)
        parents[rows], distributions[rows], lengths[rows] = self.parents, q_rows, real.sum(dim=1)
        whole[rows] = has_mass[:, None].expand(-1, self.count)
        return Proposal(
            tokens=tokens,
            lengths=lengths,
            logits=logits,
            parents=parents,
            q_rows=distributions,
            has_mass=whole,
        )


def no_trees(inputs: DraftInputs) -> Proposal:
    none = torch.empty(0, 1, dtype=torch.int64, device=inputs.tokens.device)
    return TreeNodes(0, none.device).proposal(inputs, none[:, 0], None, none, none[:, 0] > 0)


def merged(one: Proposal, other: Proposal) -> Proposal:
    """Trees of the same batch, where no row has a tree in both."""
    if one.tokens.shape[1] < other.tokens.shape[1]:
        one, other = other, one
    assert other.q_rows is not None and one.has_mass is not None and other.has_mass is not None
    missing, pad = (0, one.tokens.shape[1] - other.tokens.shape[1]), torch.nn.functional.pad
    logits, distributions = one.logits, other.q_rows
    if other.logits is not None:
        distributions = torch.where(
            distributions < 0, -1, distributions + (0 if logits is None else len(logits))
        )
        logits = other.logits if logits is None else torch.cat([logits, other.logits])
    chosen = (other.lengths > 0)[:, None]

    def either(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> torch.Tensor:
        assert mine is not None and theirs is not None
        return torch.where(chosen, pad(theirs, missing, value=-1), mine)

    return Proposal(
        tokens=either(one.tokens, other.tokens),
        lengths=one.lengths + other.lengths,
        logits=logits,
        parents=either(one.parents, other.parents),
        q_rows=either(one.q_rows, distributions),
        has_mass=one.has_mass & pad(other.has_mass, missing, value=True),
    )


def _put(places: torch.Tensor, values: torch.Tensor, width: int, empty: float) -> torch.Tensor:
    """values [R, C] at places [R, C] -> [R, width]; those at place `width` are dropped."""
    out = torch.full((len(values), width + 1), empty, dtype=values.dtype, device=values.device)
    return out.scatter(1, places, values)[:, :width]


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node, 0 for children of the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


class NodeLayout(NamedTuple):
    """Layout of trees whose parents are on the device alone."""

    depths: torch.Tensor  # [B, N] int64, 0 for children of the root and for padding
    ancestors: torch.Tensor  # [B, N] int64, as `TreeLayout` has them

    @classmethod
    def of(cls, tree: DraftTree) -> NodeLayout:
        return cls(depths(tree).clamp(min=0), ancestors(tree))

    def lay_out(
        self, positions: torch.Tensor, sources: torch.Tensor, places: torch.Tensor
    ) -> TreeLayout:
        """Layout of a pass.

        Args:
            positions: [T] int64, consecutive in each row; those of nodes are changed in place.
            sources: [n] int64, of the flattened nodes.
            places: [n] int64, where these are in the pass.
        """
        kv_indices = positions.clone()
        ends = kv_indices[places] - sources % self.depths.shape[1]  # first index behind the text
        positions.index_copy_(0, places, ends + self.depths.flatten()[sources])
        seen = torch.full_like(positions, -1)
        return TreeLayout(
            kv_indices,
            seen.index_copy(0, places, self.ancestors.flatten()[sources]),
            torch.zeros_like(positions).index_copy(0, places, ends - 1),
        )


def tried(parents: Sequence[int], path: Sequence[int]) -> list[int]:
    """The path and, if it ends above other nodes, the first of these: it was tested and
    rejected."""
    end = path[-1] if path else -1
    return [*path, *(node for node, parent in enumerate(parents) if parent == end)][: len(path) + 1]
