"""Drafted tokens of a round, chains and trees, and what verification makes of them. A tree holds
several continuations of one text that share their prefixes, verified in one pass of the target.

Legend: B rows, K drafted tokens, V vocabulary, N nodes, S = N + 1 slots: slot 0 is the root (the
last committed token), slot i + 1 is node i.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Drafts(NamedTuple):
    """Drafted tokens of the first D of B rows."""

    tokens: torch.Tensor  # [D, K] int64
    lengths: torch.Tensor  # [D] int64
    logits: torch.Tensor | None  # [D, K, V] processed; None where drafting was deterministic
    # [D] int64, >= lengths: rows of target logits that each row owns beside its first one
    sizes: torch.Tensor

    def select(self, rows: torch.Tensor) -> Drafts:
        return Drafts(*(part if part is None else part[rows] for part in self))

    def padded(self, num_rows: int) -> Drafts:
        """The same of all rows; those behind the first D have none."""
        missing = num_rows - len(self.tokens)
        if missing == 0:
            return self
        pad = torch.nn.functional.pad
        logits = self.logits
        if logits is not None:
            logits = pad(logits, (0, 0, 0, 0, 0, missing), value=-torch.inf)
        return Drafts(
            pad(self.tokens, (0, 0, 0, missing), value=-1),
            pad(self.lengths, (0, missing)),
            logits,
            pad(self.sizes, (0, missing)),
        )


class Verdict(NamedTuple):
    accepted: torch.Tensor  # [B] int64, how many drafted tokens were kept
    tokens: torch.Tensor  # [B, K + 1] int64: the kept drafts, the residual or bonus token, then -1


class TreeVerdict(NamedTuple):
    accepted: torch.Tensor  # [B] int64, how many drafted tokens were kept
    tokens: torch.Tensor  # [B, N + 1] int64: the kept drafts, the residual or bonus token, then -1
    nodes: torch.Tensor  # [B, N] int64: the kept nodes in order, then -1


class DraftTree(NamedTuple):
    """Node i of row b hangs under node `parents[b, i]` (< i), or under the last committed token
    when that is -1. Under -2 it hangs nowhere and is never kept: so a row is padded to the nodes
    that the pass has of it.

    Nodes are in topological order, siblings in the order they are to be tested. Entries at
    `lengths[b]` and beyond are not read. The target's logits of row b are `lengths[b] + 1`
    consecutive rows: the distribution after the last committed token, then the distribution after
    each node.
    """

    tokens: torch.Tensor  # [B, N] int64; a negative one is no draft and is never kept
    parents: torch.Tensor  # [B, N] int64
    lengths: torch.Tensor  # [B] int64, 0 <= lengths[b] <= N <= MAX_NODES


def depths(tree: DraftTree) -> torch.Tensor:
    """[B, N] int64: 0 for a child of the root, so that a node's absolute position is its row's
    first drafted one plus this.

    -1 beyond a row's nodes and where a node hangs nowhere.
    """
    ups = _up(tree)
    steps = (ups != torch.arange(ups.shape[1], device=ups.device)).long()
    for _ in range(tree.tokens.shape[1].bit_length()):
        steps, ups = steps + steps.gather(1, ups), ups.gather(1, ups)
    return torch.where(_real(tree), steps[:, 1:] - 1, -1)


def ancestors(tree: DraftTree) -> torch.Tensor:
    """[B, N] int64 of bits: 0 is the last committed token, i + 1 node i. A node has those on its
    path from the root, its own included; one beyond a row's nodes or that hangs nowhere has its own
    alone."""
    ups = _up(tree)
    places = torch.arange(ups.shape[1], device=ups.device)
    bits = (1 << places).expand_as(ups)
    for _ in range(tree.tokens.shape[1].bit_length()):
        bits, ups = bits | bits.gather(1, ups), ups.gather(1, ups)
    return bits[:, 1:]


def paths(tree: DraftTree) -> torch.Tensor:
    """[B, S, N] int64: the tokens from the root to each slot, its own included, at the places of
    their nodes; -1 elsewhere."""
    nodes = torch.arange(1, tree.tokens.shape[1] + 1, device=tree.tokens.device)
    bits = torch.nn.functional.pad(ancestors(tree), (1, 0))
    on_path = (bits[:, :, None] >> nodes) & 1 == 1
    return torch.where(on_path, tree.tokens[:, None], -1)


def _real(tree: DraftTree) -> torch.Tensor:
    return torch.arange(tree.parents.shape[1], device=tree.parents.device) < tree.lengths[:, None]


def _up(tree: DraftTree) -> torch.Tensor:
    """[B, S] int64: the slot above each slot; the root and slots beyond a row's nodes are above
    themselves."""
    slots = torch.arange(1, tree.parents.shape[1] + 1, device=tree.parents.device)
    hangs = _real(tree) & (tree.parents >= -1)
    return torch.nn.functional.pad(torch.where(hangs, tree.parents + 1, slots), (1, 0), value=0)
