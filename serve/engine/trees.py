"""Trees behind the verification of a round: the collapse of a kept path into an ordinary chain
before it is committed.

Legend: a row's nodes are numbered in the order of its drafted tokens; -1 is its newest committed
token, the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.trees.layout import tried
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.dispatch import sent
from draftsmith.serve.engine.proposal import Drafted
from draftsmith.serve.engine.round import PassOutput
from draftsmith.serve.engine.scheduler import ScheduledRow


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

    drafted: Drafted
    output: PassOutput


def collapse_to_chain(
    rows: Sequence[ScheduledRow],
    drafted: Drafted,
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
    assert drafted.parents is not None
    count = len(drafted.chains)
    nodes = [tried(parents, path) for parents, path in zip(drafted.parents, paths)]
    chains = [
        [chain[node] for node in kept] for chain, kept in zip(drafted.chains, nodes, strict=True)
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
            num_logits += 1 + (len(drafted.chains[index]) if index < count else 0)
    taps_at, logits_at = sent(output.logits.device, tap_rows, logit_rows)
    taps = None if output.taps is None else output.taps[taps_at]
    q_logits = _path_distributions(drafted, nodes) if with_distributions else None
    return CollapsedRound(
        drafted._replace(chains=chains, logits=q_logits, parents=None, q_rows=None),
        output._replace(logits=output.logits[logits_at], taps=taps, begins=begins),
    )


def _path_distributions(drafted: Drafted, nodes: Sequence[Sequence[int]]) -> torch.Tensor | None:
    """[B, K, V] distributions that the children of each node's parent were drawn from, first to
    last; one-hot where nothing was drawn."""
    if drafted.logits is None or drafted.q_rows is None or drafted.parents is None:
        return None
    width = max(map(len, nodes), default=0)
    owners: list[int] = []
    slots: list[int] = []  # that the nodes hang under
    targets: list[int] = []
    tokens: list[int] = []
    for row, kept in enumerate(nodes):
        owners += [row] * len(kept)
        slots += (drafted.parents[row][node] + 1 for node in kept)
        targets += range(row * width, row * width + len(kept))
        tokens += (drafted.chains[row][node] for node in kept)
    rows_at, slots_at, targets_at, ids = sent(drafted.logits.device, owners, slots, targets, tokens)
    size = drafted.logits.shape[1]
    one_hot = drafted.logits.new_full((len(owners), size), -torch.inf)
    one_hot.scatter_(1, ids[:, None], 0.0)
    q_rows = drafted.q_rows[rows_at, slots_at]
    given = torch.where((q_rows < 0)[:, None], one_hot, drafted.logits[q_rows.clamp(min=0)])
    distributions = drafted.logits.new_full((len(nodes) * width, size), -torch.inf)
    return distributions.index_copy_(0, targets_at, given).view(len(nodes), width, size)
