"""Checks of a drafter's proposal, its copy on the host, and the joining of several drafts'
proposals.

Legend: B drafting rows, K draft positions, N nodes of a row's tree, V vocabulary, Q distributions
of trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import gt

import torch

from draftsmith.drafters.interface import Proposal
from draftsmith.kernels.constants import MAX_NODES
from draftsmith.kernels.dispatch import sent
from draftsmith.kernels.verify.draft_tree import DraftTree, chain_tree
from draftsmith.serve.engine.round import DraftSource, Part, RoundProposal, RoundTree, UnreadDrafts
from draftsmith.serve.engine.trees import check_tree, report_width, tree_report, unread_tree


class BadProposal(ValueError):
    """The drafter returned something no verification should see."""


def checked(proposal: Proposal, allowed: Sequence[int], vocab_size: int) -> RoundProposal:
    """Check a proposal and copy its tokens to the host. Raises `BadProposal`.

    Args:
        allowed: [B] most drafted tokens per row.
    """
    # The round's one copy of the drafted tokens from the device.
    host_rows: list[list[int]] = _report(proposal, _has_mass(proposal)).tolist()
    chains = _chains(host_rows, proposal.tokens.shape[1], allowed, vocab_size)
    if proposal.parents is not None:
        draft = DraftTree(proposal.tokens, proposal.parents, proposal.lengths)
        return _checked_trees(_grown(proposal, chains, draft), host_rows)
    return _checked_chains(proposal, chains, host_rows)


def _report(proposal: Proposal, mass: torch.Tensor | None) -> torch.Tensor:
    """[B, 1 + K or 1 + 2 K] int64: lengths, tokens and, where it has to be looked at, mass. Behind
    that the report of trees."""
    parts = [proposal.lengths[:, None], proposal.tokens]
    if mass is not None:
        parts.append(mass.long())
    if proposal.parents is not None:
        parts.append(tree_report(proposal))
    return torch.cat(parts, dim=1)


def _grown(proposal: Proposal, chains: list[list[int]], draft: DraftTree) -> RoundProposal:
    """A proposal of trees, whose parents the host does not have yet."""
    count = len(chains)
    return RoundProposal(
        chains,
        [DraftSource.DRAFT] * count,
        [proposal.q_rows is not None] * count,
        [True] * count,
        draft.tokens,
        draft.lengths,
        proposal.logits,
        RoundTree(draft, proposal.q_rows, [[-1] * len(chain) for chain in chains]),
    )


def _chains(
    host_rows: Sequence[list[int]], width: int, allowed: Sequence[int], vocab_size: int
) -> list[list[int]]:
    """Tokens of a report, if they are such as were asked for. `width` tokens of a row are there."""
    lengths = [row[0] for row in host_rows]
    if (
        len(lengths) != len(allowed)
        or any(map(gt, lengths, allowed))
        or max(lengths, default=0) > width
    ):
        raise BadProposal(f"drafted {lengths} of {width} tokens where {list(allowed)} were allowed")
    chains = [row[1 : 1 + length] for row, length in zip(host_rows, lengths)]
    for chain in chains:
        if chain and not 0 <= min(chain) <= max(chain) < vocab_size:
            raise BadProposal(
                f"drafted {chains}, with a token outside the vocabulary of {vocab_size}"
            )
    return chains


def unread(
    proposal: Proposal, allowed: Sequence[int], budgets: torch.Tensor, vocab_size: int
) -> RoundProposal:
    """Chains or trees whose tokens stay on the device until `read_late`. What `checked` would not
    let pass is not usable: one strange token or length leaves all rows without drafts.

    Args:
        budgets: `allowed`, on the device.
    """
    tokens, lengths = proposal.tokens, proposal.lengths
    num_rows, width = tokens.shape
    if num_rows != len(allowed):
        raise BadProposal(f"drafted for {num_rows} rows where {len(allowed)} were allowed")
    most = width if proposal.parents is None else min(width, MAX_NODES)
    mass, rooms = _has_mass(proposal), budgets.clamp(max=most)
    chains = [[0] * min(one, most) for one in allowed]
    offered = torch.arange(width, device=tokens.device) < lengths[:, None]
    inside = tokens.clamp(0, vocab_size - 1)
    strange = (offered & (inside != tokens)).any() | (lengths > rooms).any()
    late = UnreadDrafts(_report(proposal, mass), rooms)
    if proposal.parents is not None:
        sound = replace(proposal, tokens=inside)
        draft = unread_tree(sound, offered & ~strange, rooms)
        if isinstance(draft, str):
            raise BadProposal(f"drafted {draft}")
        return replace(_grown(proposal, chains, draft), unread=late)
    usable = lengths
    if mass is not None:
        usable = torch.minimum(lengths, (mass | ~offered).long().cumprod(dim=1).sum(dim=1))
    return RoundProposal(
        chains,
        *_origins(proposal, num_rows),
        [True] * num_rows,
        inside,
        usable.masked_fill(strange, 0),
        proposal.logits,
        unread=late,
    )


def read_late(
    proposal: RoundProposal, host_rows: Sequence[list[int]], vocab_size: int
) -> RoundProposal:
    """The proposal that `checked` would have made of an `unread` one, from its report. Raises
    `BadProposal`."""
    chains = _chains(
        host_rows, proposal.tokens.shape[1], [len(chain) for chain in proposal.chains], vocab_size
    )
    proposal = replace(proposal, chains=chains, unread=None)
    if proposal.tree is not None:
        return _checked_trees(proposal, host_rows)
    width = proposal.tokens.shape[1]
    usable, has_mass = _usable(
        [row[0] for row in host_rows], [row[1 + width :] for row in host_rows]
    )
    chains = [chain[:kept] for chain, kept in zip(chains, usable)]
    return replace(proposal, chains=chains, has_mass=has_mass)


def _checked_trees(proposal: RoundProposal, host_rows: Sequence[list[int]]) -> RoundProposal:
    """The same with parents and masses of its report."""
    assert proposal.tree is not None
    draft, q_rows, _ = proposal.tree
    width, logits = draft.tokens.shape[1], proposal.logits
    own = report_width(width, drawn=logits is not None and q_rows is not None)
    grown = check_tree(
        draft,
        q_rows,
        None if logits is None else len(logits),
        [row[len(row) - own :] for row in host_rows],
        [row[0] for row in host_rows],
    )
    if isinstance(grown, str):
        raise BadProposal(f"drafted {grown}")
    tree, sound = grown
    has_mass = [
        fine and all(row[1 + width : len(row) - own]) for fine, row in zip(sound, host_rows)
    ]
    return replace(proposal, tree=tree, has_mass=has_mass)


def _checked_chains(
    proposal: Proposal, chains: list[list[int]], host_rows: Sequence[list[int]]
) -> RoundProposal:
    width, used = proposal.tokens.shape[1], proposal.lengths
    masses, has_mass = [row[1 + width :] for row in host_rows], [True] * len(chains)
    if not all(map(all, masses)):  # nearly always they are
        usable, has_mass = _usable([row[0] for row in host_rows], masses)
        chains = [chain[:kept] for chain, kept in zip(chains, usable)]
        used = used if all(has_mass) else torch.tensor(usable, device=used.device)
    sources, drawn = _origins(proposal, len(chains))
    return RoundProposal(chains, sources, drawn, has_mass, proposal.tokens, used, proposal.logits)


def _usable(
    lengths: Sequence[int], masses: Sequence[Sequence[int]]
) -> tuple[list[int], list[bool]]:
    """(number of usable tokens, all of them are) of each row.

    NaN weights end here. Tokens drafted before them are verified all the same: dropping a token for
    what followed it would be choosing among the draws (invariant 4). Entries beyond a row's length
    may be anything.
    """
    usable = [leading(mass[:length], length) for mass, length in zip(masses, lengths)]
    return usable, [kept == length for kept, length in zip(usable, lengths)]


def _origins(proposal: Proposal, num_rows: int) -> tuple[list[DraftSource], list[bool]]:
    """(origin, drawn from a distribution) of each row's tokens."""
    is_drawn = proposal.logits is not None
    if not proposal.copied:
        return [DraftSource.DRAFT] * num_rows, [is_drawn] * num_rows
    copied = [row in proposal.copied for row in range(num_rows)]
    sources = [DraftSource.TEXT if from_text else DraftSource.DRAFT for from_text in copied]
    return sources, [is_drawn and not from_text for from_text in copied]


def leading(flags: Sequence[int], length: int) -> int:
    """Number of set flags before the first one that is not; `length` where none is unset."""
    return next((index for index, flag in enumerate(flags) if not flag), length)


def _has_mass(proposal: Proposal) -> torch.Tensor | None:
    """[B, K] bool: the token has mass in the distribution it was drawn from. One that gives none to
    its own draw is no distribution."""
    if proposal.has_mass is not None or proposal.logits is None or proposal.parents is not None:
        return proposal.has_mass
    tokens = proposal.tokens.clamp(0, proposal.logits.shape[2] - 1)
    return torch.isfinite(proposal.logits.gather(2, tokens[:, :, None])[:, :, 0])


def joined(parts: Sequence[Part], num_rows: int) -> RoundProposal:
    """Proposal of the whole round; rows in none of the parts have no drafted tokens. Where every
    part is unread, so is the whole; otherwise none may be."""
    width = max(part.proposal.tokens.shape[1] for part in parts)
    like = parts[0].proposal.tokens
    tokens = like.new_full((num_rows, width), -1)
    lengths = like.new_zeros(num_rows)
    for rows, own in parts:
        (at,) = sent(like.device, rows)
        tokens[at, : own.tokens.shape[1]] = own.tokens.to(like)
        lengths[at] = own.lengths.to(like)
    tree = None
    if any(part.proposal.tree is not None for part in parts):
        tree, logits = _joined_trees(parts, tokens, lengths)
    else:
        logits = _joined_distributions(parts, (num_rows, width))
    host = _host_fields(parts, num_rows)
    return RoundProposal(*host, tokens, lengths, logits, tree, _joined_unread(parts, num_rows))


def settled(proposal: RoundProposal, parts: Sequence[Part]) -> RoundProposal:
    """A proposal of several drafts whose `parts` are read by now; those that are missing were
    malformed, so that their rows have no drafted tokens."""
    num_rows, tree = len(proposal.chains), proposal.tree
    chains, sources, drawn, has_mass = _host_fields(parts, num_rows)
    if tree is not None:
        tree = tree._replace(parents=_host_parents(parts, num_rows))
    return replace(
        proposal,
        chains=chains,
        sources=sources,
        drawn=drawn,
        has_mass=has_mass,
        tree=tree,
        unread=None,
    )


def part_reports(proposal: RoundProposal, report: Sequence[list[int]]) -> list[list[list[int]]]:
    """Reports of the parts of an unread proposal of several drafts, out of that of the whole."""
    assert proposal.unread is not None
    return [
        [report[row][: own.unread.report.shape[1]] for row in rows]
        for rows, own in proposal.unread.parts
        if own.unread is not None
    ]


def _host_fields(
    parts: Sequence[Part], num_rows: int
) -> tuple[list[list[int]], list[DraftSource], list[bool], list[bool]]:
    """(chains, sources, drawn, has_mass) of every row."""
    chains: list[list[int]] = [[] for _ in range(num_rows)]
    sources = [DraftSource.NONE] * num_rows
    drawn = [False] * num_rows
    has_mass = [False] * num_rows
    for rows, own in parts:
        for index, row in enumerate(rows):
            chains[row], has_mass[row] = own.chains[index], own.has_mass[index]
            sources[row], drawn[row] = own.sources[index], own.drawn[index]
    return chains, sources, drawn, has_mass


def _joined_unread(parts: Sequence[Part], num_rows: int) -> UnreadDrafts | None:
    every = [(rows, own.unread) for rows, own in parts if own.unread is not None]
    if not every:
        return None
    assert len(every) == len(parts), "parts are unread together or not at all"
    like = every[0][1].report
    report = like.new_zeros((num_rows, max(late.report.shape[1] for _, late in every)))
    rooms = like.new_zeros(num_rows)
    for rows, late in every:
        (at,) = sent(like.device, rows)
        report[at, : late.report.shape[1]] = late.report
        rooms[at] = late.rooms
    return UnreadDrafts(report, rooms, parts=parts)


def _joined_distributions(parts: Sequence[Part], shape: tuple[int, int]) -> torch.Tensor | None:
    """[B, K, V], one-hot where nothing was drawn; None where nothing was drawn at all."""
    given = [part.proposal.logits for part in parts if part.proposal.logits is not None]
    if not given:
        return None
    size = given[0].shape[2]
    distributions = given[0].new_full((*shape, size), -torch.inf)
    for rows, own in parts:
        (at,) = sent(distributions.device, rows)
        if own.logits is not None:
            distributions[at, : own.logits.shape[1]] = own.logits
            continue
        # Those beyond a row's length may be anything.
        ids = own.tokens.to(distributions.device).clamp(0, size - 1)
        one_hot = distributions.new_full((*ids.shape, size), -torch.inf)
        distributions[at, : ids.shape[1]] = one_hot.scatter_(2, ids[:, :, None], 0.0)
    return distributions


def _host_parents(parts: Sequence[Part], num_rows: int) -> list[list[int]]:
    parents: list[list[int]] = [[] for _ in range(num_rows)]
    for rows, own in parts:
        for row, its in zip(rows, _tree_of(own).parents, strict=True):
            parents[row] = its
    return parents


def _joined_trees(
    parts: Sequence[Part], tokens: torch.Tensor, lengths: torch.Tensor
) -> tuple[RoundTree, torch.Tensor | None]:
    """Trees of all rows, and the distributions [Q, V] that their nodes were drawn from."""
    parents = torch.full_like(tokens, -1)
    q_rows = parents.new_full((len(tokens), tokens.shape[1] + 1), -1)
    distributions: list[torch.Tensor] = []
    for rows, own in parts:
        tree = _tree_of(own)
        (at,) = sent(tokens.device, rows)
        parents[at, : tree.draft.parents.shape[1]] = tree.draft.parents.to(parents)
        if own.logits is not None and tree.q_rows is not None:
            shifted = tree.q_rows + sum(map(len, distributions))
            q_rows[at, : shifted.shape[1]] = torch.where(tree.q_rows < 0, -1, shifted)
            distributions.append(own.logits)
    logits = torch.cat(distributions) if distributions else None
    return RoundTree(
        DraftTree(tokens, parents, lengths),
        q_rows if distributions else None,
        _host_parents(parts, len(tokens)),
    ), logits


def _tree_of(own: RoundProposal) -> RoundTree:
    """Tree of a part. A chain among trees comes from the fallback, which matches text: no
    distribution comes with it."""
    if own.tree is not None:
        return own.tree
    assert own.logits is None
    parents = [list(range(-1, len(chain) - 1)) for chain in own.chains]
    return RoundTree(chain_tree(own.tokens, own.lengths), None, parents)
