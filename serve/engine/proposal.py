"""A proposal as the round uses it: checked, on the host where the host needs it, and of several
drafts made one.

Legend: B drafting rows, K draft positions, N nodes of a row's tree, V vocabulary, Q distributions
of trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import Proposal
from draftsmith.kernels.verify.draft_tree import DraftTree, chain_tree
from draftsmith.serve.engine.round import Drafts, RoundTree
from draftsmith.serve.engine.trees import check_tree


class BadProposal(ValueError):
    """The drafter returned something no verification should see."""


def checked(proposal: Proposal, allowed: Sequence[int], vocab_size: int) -> Drafts:
    """`allowed` [B] drafts a row. Raises `BadProposal`."""
    width = proposal.tokens.shape[1]
    # The round's one look at what was drafted.
    parts = [proposal.lengths[:, None], proposal.tokens]
    if (massive := _massive(proposal)) is not None:
        parts.append(massive.long())
    told: list[list[int]] = torch.cat(parts, dim=1).tolist()
    lengths = [row[0] for row in told]
    if len(lengths) != len(allowed) or any(length > most for length, most in zip(lengths, allowed)):
        raise BadProposal(f"drafted {lengths} tokens where {list(allowed)} were allowed")
    chains = [row[1 : 1 + length] for row, length in zip(told, lengths)]
    if any(not 0 <= token < vocab_size for chain in chains for token in chain):
        raise BadProposal(f"drafted {chains}, with a token outside the vocabulary of {vocab_size}")
    if proposal.parents is not None:
        grown = check_tree(proposal, lengths)
        if isinstance(grown, str):
            raise BadProposal(f"drafted {grown}")
        tree, sound = grown
        sound = [fine and all(row[1 + width :]) for fine, row in zip(sound, told)]
        drawn = proposal.q_rows is not None
        return Drafts(
            chains, sound, proposal.tokens, proposal.lengths, proposal.logits, tree, sampled=drawn
        )
    # NaN weights end here. What was drafted before them is verified all the same: to drop a token
    # for what came of it later would be to choose among the draws (invariant 4). What lies beyond a
    # row's length may be anything.
    usable = [
        leading(row[1 + width : 1 + width + length], length) for row, length in zip(told, lengths)
    ]
    sound = [kept == length for kept, length in zip(usable, lengths)]
    chains = [chain[:kept] for chain, kept in zip(chains, usable)]
    used = proposal.lengths if all(sound) else torch.tensor(usable, device=proposal.lengths.device)
    sampled = proposal.logits is not None
    return Drafts(
        chains, sound, proposal.tokens, used, proposal.logits,
        sampled=sampled, undrawn=proposal.copied, copied=proposal.copied,
    )  # fmt: skip


def leading(flags: Sequence[int], length: int) -> int:
    """How many of the first `length` are set before one that is not; all where nothing is told."""
    return next((index for index, flag in enumerate(flags) if not flag), length)


def _massive(proposal: Proposal) -> torch.Tensor | None:
    """[B, K], whether each token has mass in the distribution it was drawn from: one that gives
    none to its own draw is no distribution."""
    if proposal.has_mass is not None or proposal.logits is None or proposal.parents is not None:
        return proposal.has_mass
    tokens = proposal.tokens.clamp(0, proposal.logits.shape[2] - 1)
    return torch.isfinite(proposal.logits.gather(2, tokens[:, :, None])[:, :, 0])


class Part(NamedTuple):
    """What one draft drafted of a round."""

    rows: list[int]  # of the round
    drafts: Drafts


def joined(parts: Sequence[Part], num_rows: int) -> Drafts:
    """The round's drafts of all parts; rows in none of them have no drafts."""
    width = max(part.drafts.tokens.shape[1] for part in parts)
    like = parts[0].drafts.tokens
    chains: list[list[int]] = [[] for _ in range(num_rows)]
    sound = [False] * num_rows
    tokens = like.new_full((num_rows, width), -1)
    lengths = like.new_zeros(num_rows)
    served: set[int] = set()
    undrawn: set[int] = set()
    copied: set[int] = set()
    for rows, drafts in parts:
        for index, row in enumerate(rows):
            chains[row], sound[row] = drafts.chains[index], drafts.sound[index]
        at = torch.tensor(rows, device=like.device)
        tokens[at, : drafts.tokens.shape[1]] = drafts.tokens.to(like)
        lengths[at] = drafts.lengths.to(like)
        served |= {row for index, row in enumerate(rows) if index not in drafts.missed}
        undrawn |= {
            row for index, row in enumerate(rows) if not drafts.sampled or index in drafts.undrawn
        }
        copied |= {row for index, row in enumerate(rows) if index in drafts.copied}
    tree = None
    if any(part.drafts.tree is not None for part in parts):
        tree, logits = _joined_trees(parts, tokens, lengths)
    else:
        logits = _joined_distributions(parts, (num_rows, width))
    return Drafts(
        chains, sound, tokens, lengths, logits, tree,
        missed=frozenset(range(num_rows)) - served,
        sampled=any(part.drafts.sampled for part in parts),
        undrawn=frozenset(undrawn),
        copied=frozenset(copied),
    )  # fmt: skip


def _joined_distributions(parts: Sequence[Part], shape: tuple[int, int]) -> torch.Tensor | None:
    """[B, K, V], one-hot where nothing was drawn; None where nothing was drawn at all."""
    given = [part.drafts.logits for part in parts if part.drafts.logits is not None]
    if not given:
        return None
    distributions = given[0].new_full((*shape, given[0].shape[2]), -torch.inf)
    for rows, drafts in parts:
        if drafts.logits is not None:
            distributions[
                torch.tensor(rows, device=distributions.device), : drafts.logits.shape[1]
            ] = drafts.logits
            continue
        for row, chain in zip(rows, drafts.chains, strict=True):
            distributions[row, torch.arange(len(chain)), chain] = 0.0
    return distributions


def _joined_trees(
    parts: Sequence[Part], tokens: torch.Tensor, lengths: torch.Tensor
) -> tuple[RoundTree, torch.Tensor | None]:
    """Trees of all rows, and the distributions [Q, V] that their nodes were drawn from."""
    parents = torch.full_like(tokens, -1)
    q_rows = parents.new_full((len(tokens), tokens.shape[1] + 1), -1)
    told: list[list[int]] = [[] for _ in range(len(tokens))]
    distributions: list[torch.Tensor] = []
    for rows, drafts in parts:
        tree = _tree_of(drafts)
        for index, row in enumerate(rows):
            told[row] = tree.parents[index]
        at = torch.tensor(rows, device=tokens.device)
        parents[at, : tree.draft.parents.shape[1]] = tree.draft.parents.to(parents)
        if drafts.logits is not None and tree.q_rows is not None:
            own = tree.q_rows + sum(map(len, distributions))
            q_rows[at, : own.shape[1]] = torch.where(tree.q_rows < 0, -1, own)
            distributions.append(drafts.logits)
    logits = torch.cat(distributions) if distributions else None
    return RoundTree(
        DraftTree(tokens, parents, lengths), q_rows if distributions else None, told
    ), logits


def _tree_of(drafts: Drafts) -> RoundTree:
    """A chain among trees is a stand-in's, which matches text: no distribution comes with it."""
    if drafts.tree is not None:
        return drafts.tree
    assert drafts.logits is None
    parents = [list(range(-1, len(chain) - 1)) for chain in drafts.chains]
    return RoundTree(chain_tree(drafts.tokens, drafts.lengths), None, parents)
