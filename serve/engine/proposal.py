"""Drafted tokens of a round: checked on their device, read by the host with the round's result.

Legend: B drafting rows, K drafted tokens of a row, or nodes of its tree, V vocabulary, Q
distributions of trees.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.trees.nodes import node_depths
from draftsmith.kernels.constants import MAX_NODES
from draftsmith.kernels.dispatch import read_freely
from draftsmith.kernels.verify.verdict import Drafts, DraftTree, paths


class BadProposal(ValueError):
    """The drafter returned something no verification should see."""


class DraftCheck(enum.IntEnum):
    """Kinds of a row's drafted tokens."""

    SOUND = enum.auto()
    NO_MASS = enum.auto()  # one of them had no distribution
    MALFORMED = enum.auto()  # they are not such as were asked for


class ProposedTrees(NamedTuple):
    """Trees of the drafting rows."""

    parents: torch.Tensor  # [B, K] int64, as `DraftTree` has them; -2 for what is not usable
    mass: torch.Tensor  # [B, 1] int64, 1 where the distributions of all nodes have mass
    q_rows: torch.Tensor | None  # [B, K + 1] int64 where nodes were drawn


class RoundProposal(NamedTuple):
    """Drafted tokens of the drafting rows."""

    sizes: list[int]  # drafted tokens that the pass has of each row, usable or not
    copied: frozenset[int]  # rows that text drafted, in place of the trained draft behind it
    drawn: bool  # the draft's tokens come from a distribution; False: they are deterministic
    drafted: torch.Tensor  # [B, K] int64, as the draft gave them
    tokens: torch.Tensor  # [B, K] the same, inside the vocabulary
    offered: torch.Tensor  # [B] int64, how many of them the draft gave
    usable: torch.Tensor  # [B] int64, how many of these, from the first on, are verified
    held: torch.Tensor  # [B] int64, `sizes` on the device
    logits: torch.Tensor | None  # [B, K, V] processed; of trees [Q, V]
    nodes: ProposedTrees | None = None  # None: chains
    # the report of chains where looking costs nothing; None: it comes with the round's result
    known: list[list[int]] | None = None

    @property
    def drafts(self) -> Drafts:
        """Chains, as verification takes them."""
        return Drafts(self.tokens, self.usable, self.logits, self.held)

    @property
    def tree(self) -> DraftTree | None:
        return None if self.nodes is None else DraftTree(self.tokens, self.nodes.parents, self.held)

    @property
    def report(self) -> list[torch.Tensor]:
        """[B, n] int64 each: what the host reads with the round's result."""
        parts = [self.offered[:, None], self.usable[:, None], self.drafted]
        return parts if self.nodes is None else [*parts, *self.nodes[:2]]

    def before(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[R, K] int64: drafted tokens before the target's distributions `slots` [R] of `rows` [R],
        0 the first of a row; -1 in other columns. Rows that drafted nothing have slot 0 alone."""
        rows = rows.clamp(max=len(self.tokens) - 1)
        if (tree := self.tree) is not None:
            return paths(tree)[rows, slots]
        depths = torch.arange(self.tokens.shape[1], device=slots.device)
        return self.tokens[rows].masked_fill(depths >= slots[:, None], -1)


class Drafted(NamedTuple):
    """The same as the host reads it; every list has an entry per drafting row."""

    chains: list[list[int]]  # usable tokens
    copied: frozenset[int]
    drawn: bool
    checks: list[DraftCheck]
    depths: list[int]  # a round keeps at most so many of a row's tokens
    logits: torch.Tensor | None
    parents: list[list[int]] | None = None
    q_rows: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        proposal: RoundProposal,
        report: Sequence[list[int]],
        allowed: Sequence[int],
        vocab_size: int,
    ) -> Drafted:
        """Reading of a proposal whose rows might have `allowed` [B] tokens each of a vocabulary."""
        nodes, width = proposal.nodes, proposal.tokens.shape[1]
        chains = [row[2 : 2 + row[1]] for row in report]
        given = proposal.copied, proposal.drawn
        if nodes is None:
            sound = DraftCheck.SOUND
            checks = [
                sound if row[0] == row[1] else _check_of_chain(row, most, vocab_size)
                for row, most in zip(report, allowed, strict=True)
            ]
            return cls(chains, *given, checks, list(map(len, chains)), proposal.logits)
        parents = [row[2 + width : 2 + width + row[1]] for row in report]
        depths = [max(node_depths(one), default=-1) + 1 for one in parents]
        checks = list(map(_check_of_tree, report))
        return cls(chains, *given, checks, depths, proposal.logits, parents, nodes.q_rows)

    def offered(self, index: int) -> int:
        return self.depths[index] if index < len(self.depths) else 0

    def by_draft(self, index: int) -> bool:
        """True when the draft drafted the row, not text in its place."""
        return index < len(self.chains) and index not in self.copied

    def is_read(self, index: int) -> bool:
        """True when the draft's cache is right for the row's tokens."""
        return index < len(self.checks) and self.checks[index] is DraftCheck.SOUND


NOTHING_DRAFTED = Drafted([], frozenset(), False, [], [], None)


def _check_of_chain(row: list[int], allowed: int, vocab_size: int) -> DraftCheck:
    """Flaw of a chain that is not sound."""
    offered, usable, *tokens = row
    asked_for = 0 <= offered <= allowed and 0 <= tokens[usable] < vocab_size
    return DraftCheck.NO_MASS if asked_for else DraftCheck.MALFORMED


def _check_of_tree(row: list[int]) -> DraftCheck:
    offered, usable, *_, has_mass = row
    if usable != offered:
        return DraftCheck.MALFORMED
    return DraftCheck.SOUND if has_mass else DraftCheck.NO_MASS


def checked(
    proposal: Proposal,
    allowed: Sequence[int],
    budgets: torch.Tensor,
    vocab_size: int,
    *,
    trees: bool = False,
    exact: bool = False,
) -> RoundProposal:
    """A proposal as the pass and verification take it, without a look at a device. Raises
    `BadProposal` for what the host sees anyway.

    NaN weights and strange tokens end here. Tokens drafted before them are verified all the same:
    dropping a token for what followed it would be choosing among the draws (invariant 4). Trees
    that are malformed are left out; nodes of a distribution without mass stay, and verification
    passes over them. Entries beyond a row's length may be anything.

    Args:
        allowed: [B] most drafted tokens per row.
        budgets: the same on the device.
        trees: the rows are trees.
        exact: the pass has the usable tokens alone, which costs a look; else it may have as many as
            are allowed.
    """
    drafted, offered = proposal.tokens, proposal.lengths
    num_rows, width = drafted.shape
    if num_rows != len(allowed):
        raise BadProposal(f"drafted for {num_rows} rows where {len(allowed)} were allowed")
    most = min(width, MAX_NODES) if trees else width
    tokens = drafted.clamp(0, vocab_size - 1)
    mass = None if trees else _has_mass(proposal, tokens)
    drawn = (proposal.q_rows if trees else proposal.logits) is not None
    if not trees and (known := _known(drafted, offered, mass, allowed, vocab_size)) is not None:
        counts, usable = [row[1] for row in known], offered
        if counts != [row[0] for row in known]:
            usable = torch.tensor(counts)
        given = proposal.copied, drawn, drafted, tokens, offered, usable, usable, proposal.logits
        return RoundProposal(counts, *given, known=known)
    sound, nodes = tokens == drafted, None
    real = torch.arange(width, device=drafted.device) < offered[:, None]
    if trees:
        nodes, usable = _checked_trees(proposal, tokens, sound, real, budgets.clamp(max=most))
    else:
        sound = sound & real if mass is None else sound & real & mass
        usable = torch.minimum(sound.cumprod(dim=1).sum(dim=1), budgets)
    sizes, held = usable.tolist() if exact else read_freely(usable), usable
    if sizes is None:
        sizes, held = [min(one, most) for one in allowed], budgets.clamp(max=most)
    given = proposal.copied, drawn, drafted, tokens, offered, usable, held, proposal.logits
    return RoundProposal(sizes, *given, nodes)


def _known(
    drafted: torch.Tensor,
    offered: torch.Tensor,
    mass: torch.Tensor | None,
    allowed: Sequence[int],
    vocab_size: int,
) -> list[list[int]] | None:
    """The report of chains where looking costs nothing: a dozen operations on a few numbers take
    several times as long there. None elsewhere."""
    counts, width = read_freely(offered), drafted.shape[1]
    if counts is None:
        return None
    rows = (drafted if mass is None else torch.cat([drafted, mass], dim=1)).tolist()
    report = []
    for count, row, most in zip(counts, rows, allowed, strict=True):
        tokens, usable = row[:width], 0
        most = min(count, most, width)
        while (
            usable < most and 0 <= tokens[usable] < vocab_size and all(row[width + usable :: width])
        ):
            usable += 1
        report.append([count, usable, *tokens])
    return report


def _has_mass(proposal: Proposal, tokens: torch.Tensor) -> torch.Tensor | None:
    """[B, K] bool: the token has mass in the distribution it was drawn from. One that gives none to
    its own draw is no distribution."""
    if proposal.has_mass is not None or proposal.logits is None:
        return proposal.has_mass
    return torch.isfinite(proposal.logits.gather(2, tokens[:, :, None])[:, :, 0])


def _checked_trees(
    proposal: Proposal,
    tokens: torch.Tensor,
    sound: torch.Tensor,
    real: torch.Tensor,
    limits: torch.Tensor,
) -> tuple[ProposedTrees, torch.Tensor]:
    """Trees, and their usable nodes [B]: none of one whose nodes come before their parents, say.

    Args:
        sound: [B, K] bool, tokens inside the vocabulary.
        real: [B, K] bool, entries within their row's length.
        limits: [B] most nodes.
    """
    logits, q_rows, parents = proposal.logits, proposal.q_rows, proposal.parents
    if parents is None or (logits is not None and q_rows is None):
        raise BadProposal("drafted nodes or distributions without telling whose they are")
    nodes = torch.arange(parents.shape[1], device=parents.device)
    fine = sound & (parents >= -1) & (parents < nodes)
    whole = (fine | ~real).all(dim=1) & (proposal.lengths <= limits)
    if logits is not None and q_rows is not None:
        whole &= (q_rows < len(logits)).all(dim=1)
    parents = torch.where(real & whole[:, None], parents, -2)
    mass = torch.ones_like(whole) if proposal.has_mass is None else proposal.has_mass.all(dim=1)
    if logits is not None and q_rows is not None:
        own = q_rows.gather(1, (parents + 1).clamp(min=0))
        drawn = torch.isfinite(logits[own.clamp(0, len(logits) - 1), tokens])
        mass = mass & (drawn | (own < 0) | (parents < -1)).all(dim=1)
    usable = torch.where(whole, proposal.lengths.clamp(min=0), 0)
    return ProposedTrees(parents, mass[:, None].long(), q_rows), usable
