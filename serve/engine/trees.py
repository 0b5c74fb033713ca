"""Trees in a round: the positions of their nodes, their checks, and the collapse of a kept path
into an ordinary chain before it is committed.

Legend: a row's nodes are numbered in the order of its drafted tokens; -1 is its newest committed
token, the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.trees.layout import TreePass, TreeSpan, tree_pass, tried
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.constants import MAX_NODES
from draftsmith.kernels.dispatch import sent
from draftsmith.kernels.verify.draft_tree import DraftTree
from draftsmith.serve.engine.round import PassOutput, RoundProposal, RoundTree
from draftsmith.serve.engine.scheduler import ScheduledRow

NAMELESS = "distributions without telling whose they are"


def lay_out(rows: Sequence[ScheduledRow], tree: RoundTree, device: torch.device) -> TreePass:
    """Positions, cache indices and ancestors of all tokens of a round's pass."""
    parents = [*tree.parents, *[[]] * (len(rows) - len(tree.parents))]
    return tree_pass(
        [TreeSpan(row.begin, row.count, one) for row, one in zip(rows, parents, strict=True)],
        device,
    )


def tree_report(proposal: Proposal) -> torch.Tensor:
    """[B, N or 2 N + 2] int64 of trees, to be read with their tokens: parents and, where nodes were
    drawn, whose distributions were drawn from and if these have mass."""
    assert proposal.parents is not None
    if proposal.logits is None or proposal.q_rows is None:
        return proposal.parents
    mass = _has_mass(proposal, proposal.logits, proposal.q_rows)
    return torch.cat([proposal.parents, proposal.q_rows, mass[:, None].long()], dim=1)


def report_width(num_nodes: int, *, drawn: bool) -> int:
    """Columns of a `tree_report`."""
    return 2 * num_nodes + 2 if drawn else num_nodes


def check_tree(
    draft: DraftTree,
    q_rows: torch.Tensor | None,
    num_distributions: int | None,
    host_rows: Sequence[list[int]],
    lengths: Sequence[int],
) -> tuple[RoundTree, list[bool]] | str:
    """Proposed trees, each with True when all its nodes' distributions have mass, from their
    report; or the reason why the proposal is malformed.

    Args:
        q_rows: [B, N + 1], as the proposal has them.
        num_distributions: Q; None where nothing was drawn.
        host_rows: the report.

    Nodes of a distribution without mass stay where they are: verification passes over them, and
    dropping a token for what followed it would be choosing among the draws (invariant 4).
    """
    width = draft.parents.shape[1]
    if num_distributions is not None and q_rows is None:
        return NAMELESS
    parents = [row[:length] for row, length in zip(host_rows, lengths)]
    if max(lengths, default=0) > MAX_NODES:
        return f"a tree of {max(lengths)} nodes, where {MAX_NODES} are possible"
    if any(not -1 <= parent < node for row in parents for node, parent in enumerate(row)):
        return f"nodes that do not come after their parents {parents}"
    tree = RoundTree(draft, q_rows, parents)
    if num_distributions is None:
        return tree, [True] * len(parents)
    if any(max(row[width : 2 * width + 1]) >= num_distributions for row in host_rows):
        return NAMELESS
    return tree, [bool(row[-1]) for row in host_rows]


def unread_tree(proposal: Proposal, usable: torch.Tensor, rooms: torch.Tensor) -> DraftTree | str:
    """Trees whose parents stay on the device, padded to the rooms of their rows, with nodes that
    hang nowhere; or the reason why the proposal is malformed. What `check_tree` would not let pass
    leaves all rows without nodes.

    Args:
        usable: [B, N] bool, nodes whose tokens are sound.
        rooms: [B] int64, nodes that each row has in the pass.
    """
    assert proposal.parents is not None
    if proposal.logits is not None and proposal.q_rows is None:
        return NAMELESS
    parents = proposal.parents
    nodes = torch.arange(parents.shape[1], device=parents.device)
    sound = ~(usable & ((parents < -1) | (parents >= nodes))).any()
    if proposal.logits is not None and proposal.q_rows is not None:
        sound &= (proposal.q_rows < len(proposal.logits)).all()
    return DraftTree(proposal.tokens, torch.where(usable & sound, parents, -2), rooms)


def _has_mass(proposal: Proposal, logits: torch.Tensor, q_rows: torch.Tensor) -> torch.Tensor:
    """[B] bool: the distributions of all nodes have mass where they were drawn. Padding indices are
    clamped into range."""
    assert proposal.parents is not None
    width = proposal.tokens.shape[1]
    # Entries beyond a row's length may be anything.
    real = torch.arange(width, device=proposal.tokens.device) < proposal.lengths[:, None]
    distributions = q_rows.gather(1, torch.where(real, proposal.parents + 1, 0).clamp(0, width))
    tokens = torch.where(real, proposal.tokens, 0).clamp(0, logits.shape[1] - 1)
    drawn = logits[distributions.clamp(0, len(logits) - 1), tokens]
    return (torch.isfinite(drawn) | (distributions < 0) | ~real).all(dim=1)


def greedy_path(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Nodes on the path of greedy decoding; `choices` are the target's, after the root and after
    each node."""
    path: list[int] = []
    node = -1
    # Children come after their parent, so one pass over the nodes is enough.
    for child, (token, parent) in enumerate(zip(tokens, parents)):
        if parent == node and token == choices[node + 1]:
            path.append(child)
            node = child
    return path


def move_kept(
    pool: PagedPool,
    tables: torch.Tensor,
    rows: Sequence[ScheduledRow],
    paths: Sequence[Sequence[int]],
) -> None:
    """Move keys and values of the kept nodes to where those of a chain would be: side by side
    behind the known tokens."""
    owners: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for index, (row, path) in enumerate(zip(rows, paths)):
        begin = row.begin + row.count
        for step, node in enumerate(path):
            if node != step:
                owners.append(index)
                sources.append(begin + node)
                targets.append(begin + step)
    if owners:
        rows_at, from_at, to_at = sent(tables.device, owners, sources, targets)
        pool.move_slots(
            pool.slots_of(tables, rows_at, from_at), pool.slots_of(tables, rows_at, to_at)
        )


class CollapsedRound(NamedTuple):
    """A round as if each tree had been the chain of its kept nodes and the first one rejected
    after them."""

    proposal: RoundProposal
    output: PassOutput


def collapse_to_chain(
    rows: Sequence[ScheduledRow],
    proposal: RoundProposal,
    output: PassOutput,
    paths: Sequence[Sequence[int]],
    *,
    with_distributions: bool,
) -> CollapsedRound:
    """Replace the trees of a round by chains.

    Args:
        paths: kept nodes of the deciding rows.
        with_distributions: keep q of the chains, which records need.
    """
    assert proposal.tree is not None
    tree, count = proposal.tree, len(proposal.chains)
    nodes = [tried(parents, path) for parents, path in zip(tree.parents, paths)]
    chains = [
        [chain[node] for node in kept] for chain, kept in zip(proposal.chains, nodes, strict=True)
    ]
    logit_rows: list[int] = []
    tap_rows: list[int] = []
    begins: list[int] = []
    num_logits = 0
    for index, (row, begin) in enumerate(zip(rows, output.begins, strict=True)):
        kept = nodes[index] if index < count else []
        begins.append(len(tap_rows))
        tap_rows += range(begin, begin + row.count)
        tap_rows += (begin + row.count + node for node in kept)
        if row.samples:
            logit_rows += (num_logits + slot for slot in (0, *(node + 1 for node in kept)))
            num_logits += 1 + (len(proposal.chains[index]) if index < count else 0)
    width = max(map(len, chains), default=0)
    padded = [token for chain in chains for token in (*chain, *[-1] * (width - len(chain)))]
    taps_at, logits_at, flat, lengths = sent(
        output.logits.device, tap_rows, logit_rows, padded, [len(chain) for chain in chains]
    )
    taps = None if output.taps is None else output.taps[taps_at]
    logits, tokens = output.logits[logits_at], flat.view(len(chains), width)
    q_logits = _path_distributions(proposal, tree, nodes, width) if with_distributions else None
    return CollapsedRound(
        replace(proposal, chains=chains, tokens=tokens, lengths=lengths, logits=q_logits),
        output._replace(logits=logits, taps=taps, begins=begins),
    )


def _path_distributions(
    proposal: RoundProposal, tree: RoundTree, nodes: Sequence[Sequence[int]], width: int
) -> torch.Tensor | None:
    """[B, width, V] distributions that the children of each node's parent were drawn from, first to
    last; one-hot where nothing was drawn."""
    if proposal.logits is None or tree.q_rows is None:
        return None
    owners: list[int] = []
    slots: list[int] = []  # that the nodes hang under
    places: list[int] = []
    tokens: list[int] = []
    for row, kept in enumerate(nodes):
        owners += [row] * len(kept)
        slots += (tree.parents[row][node] + 1 for node in kept)
        places += range(row * width, row * width + len(kept))
        tokens += (proposal.chains[row][node] for node in kept)
    rows_at, slots_at, places_at, ids = sent(proposal.logits.device, owners, slots, places, tokens)
    size = proposal.logits.shape[1]
    one_hot = proposal.logits.new_full((len(owners), size), -torch.inf)
    one_hot.scatter_(1, ids[:, None], 0.0)
    q_rows = tree.q_rows[rows_at, slots_at]
    told = torch.where((q_rows < 0)[:, None], one_hot, proposal.logits[q_rows.clamp(min=0)])
    distributions = proposal.logits.new_full((len(nodes) * width, size), -torch.inf)
    return distributions.index_copy_(0, places_at, told).view(len(nodes), width, size)
