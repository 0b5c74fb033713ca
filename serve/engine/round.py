"""Values of one round: what takes part, what was proposed, what the target pass gave, what was
decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.kernels.verify.draft_tree import DraftTree


@dataclass(frozen=True)
class Drafts:
    """Row b of the drafting rows."""

    # usable tokens; empty where the drafter gave none or its first distribution failed
    chains: list[list[int]]
    # False: what the drafter did for this row is not trusted, its cache does not advance
    sound: list[bool]
    tokens: torch.Tensor  # [B, K] int64
    lengths: torch.Tensor  # [B] int64
    logits: torch.Tensor | None  # [B, K, V] processed; of trees [Q, V]
    tree: RoundTree | None = None  # how the tokens hang together when they are no chains
    # Rows that their draft did not draft, because it rests or has failed: what became of them says
    # nothing about it.
    missed: frozenset[int] = frozenset()
    sampled: bool = True  # False: deterministic, no distribution was drawn from
    undrawn: frozenset[int] = frozenset()  # deterministic rows among others
    # of these, rows that text drafted in place of the trained draft behind it
    copied: frozenset[int] = frozenset()

    @property
    def as_planned(self) -> bool:
        """For most of the rows; one draft of several that fails must not keep the control of k from
        learning."""
        return 2 * len(self.missed) < len(self.chains)

    def offered(self, index: int) -> int:
        """How deep the row's drafts go: a round keeps at most so many of them."""
        if index >= len(self.chains):
            return 0
        return len(self.chains[index]) if self.tree is None else self.tree.height(index)

    def drawn(self, index: int) -> bool:
        """Whether the row was drafted by drawing from the draft's distribution, at the temperature
        chosen for it."""
        return self.sampled and index not in self.undrawn and self.offered(index) > 0

    def by_its_draft(self, index: int) -> bool:
        """Whether the row was drafted by the draft that its request was given, and not by text in
        its place."""
        return index < len(self.chains) and index not in self.missed and index not in self.copied


class RoundTree(NamedTuple):
    """Trees of the drafting rows, which come first in the pass."""

    draft: DraftTree
    q_rows: torch.Tensor | None  # [B, N + 1]
    parents: list[list[int]]  # the same parents on the host, as many as a row has nodes

    def depths(self, row: int) -> list[int]:
        """Of the row's nodes, 0 for children of the root."""
        depths: list[int] = []
        for parent in self.parents[row]:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def height(self, row: int) -> int:
        return max(self.depths(row), default=-1) + 1


class PassOutput(NamedTuple):
    logits: torch.Tensor  # [R, V] float32: row b of the sampling rows owns 1 + its drafts
    taps: torch.Tensor | None  # [T, n * H]
    begins: list[int]  # where each row starts in T
    # [P, V] float32: after the positions that `prompt_positions` names, row after row
    prompt_logits: torch.Tensor


class Decision(NamedTuple):
    # each row's accepted drafts, then its residual or bonus token (-1 if its logits are not finite)
    emitted: list[list[int]]
    paths: list[list[int]]  # each row's accepted nodes when trees were drafted; empty for chains
