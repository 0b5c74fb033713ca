"""Positions of trees in a target pass: each row's known tokens, then its nodes.

Legend: B rows, N nodes, T tokens of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.kernels.attention.pool import TreeLayout
from draftsmith.kernels.dispatch import sent
from draftsmith.kernels.verify.verdict import DraftTree, ancestors, depths


class TreeSpan(NamedTuple):
    """Tokens of a row in a pass."""

    begin: int  # position of the first known token
    num_known: int
    parents: Sequence[int]  # of the nodes; -1: the last known token


class TreePass(NamedTuple):
    """Positions and attention layout of a pass with trees."""

    positions: list[int]
    layout: TreeLayout


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node, 0 for children of the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def tree_pass(spans: Sequence[TreeSpan], device: torch.device) -> TreePass:
    """Positions, cache indices and ancestors of all tokens of a pass."""
    positions: list[int] = []
    kv_indices: list[int] = []
    ancestors: list[int] = []
    first: list[int] = []
    for begin, num_known, parents in spans:
        end = begin + num_known
        bits: list[int] = []
        for node, parent in enumerate(parents):
            bits.append((1 if parent < 0 else bits[parent]) | 1 << (node + 1))
        positions += range(begin, end)
        positions += (end + depth for depth in node_depths(parents))
        kv_indices += range(begin, end + len(parents))
        ancestors += [-1] * num_known + bits
        first += [end - 1] * (num_known + len(parents))
    return TreePass(
        positions,
        TreeLayout(*sent(device, kv_indices, ancestors, first)),
    )


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
        """Layout of a pass, the same as `tree_pass` makes.

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
