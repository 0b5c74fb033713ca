"""Verification of a round: from target logits to emitted tokens, by each request's distribution;
and the collapse of a tree's kept path into an ordinary chain before it is committed.

Legend: B deciding rows, of which the first draft; K drafted tokens of a row, or nodes of its tree;
R rows of logits, V vocabulary. A row's nodes are numbered in the order of its drafted tokens; -1 is
its newest committed token, the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from draftsmith.drafters.trees.nodes import tried
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.dispatch import Reading, sent
from draftsmith.kernels.sampling.filters import process
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_logits
from draftsmith.kernels.verify.tree import verify_sure_tree, verify_tree
from draftsmith.kernels.verify.verdict import DraftTree
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.proposal import Drafted, RoundProposal
from draftsmith.serve.engine.round import AdjustedRows, Round, RowSampling
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.sampling.adjustments import Adjustments

# (target logits [R, V] under the requests' penalties, bans and masks, of which row b owns one more
# than the pass has drafted tokens of it; what was drafted, None where nothing was; the deciding
# rows) -> [B, 2 + K] int64 on the device: how many drafted tokens of a row were kept, these, the
# token after them (-1 if its logits are not finite), -1; of trees [B, 2 + 2 K]: then the kept nodes
Rule = Callable[[torch.Tensor, RoundProposal | None, RowSampling], torch.Tensor]


def rule_name(config: EngineConfig, *, trees: bool) -> str:
    """Rule of the engine's rounds, as their records name it."""
    return "tree" if trees else config.verification


def by_chain(
    logits: torch.Tensor, proposal: RoundProposal | None, sampling: RowSampling
) -> torch.Tensor:
    drafts = None if proposal is None else proposal.drafts
    rows = sampling.distributions()
    return verify_logits(logits, rows, drafts, sampling.seeds, sampling.positions)


def by_block(
    logits: torch.Tensor, proposal: RoundProposal | None, sampling: RowSampling
) -> torch.Tensor:
    # Without distributions, and of greedy rows, a block is a chain.
    if proposal is None or proposal.logits is None or sampling.all_greedy:
        return by_chain(logits, proposal, sampling)
    tokens, lengths, q_logits, held = proposal.drafts.padded(len(sampling.params))
    p_logits = process(logits, sampling.repeated(proposal.sizes))
    streams = sampling.seeds, sampling.positions
    verdict = verify_block(p_logits, tokens, lengths, q_logits, *streams, sizes=held)
    return torch.cat([verdict.accepted[:, None], verdict.tokens], dim=1)


def by_tree(
    logits: torch.Tensor, proposal: RoundProposal | None, sampling: RowSampling
) -> torch.Tensor:
    if proposal is None or proposal.nodes is None:
        return by_chain(logits, proposal, sampling)
    missing = len(sampling.params) - len(proposal.sizes)
    tree = DraftTree(
        pad(proposal.tokens, (0, 0, 0, missing)),
        pad(proposal.nodes.parents, (0, 0, 0, missing)),
        pad(proposal.held, (0, missing)),
    )
    streams, greedy = (sampling.seeds, sampling.positions), sampling.all_greedy
    if greedy or proposal.logits is None:
        rows = sampling.distributions()
        verdict = verify_sure_tree(logits, rows, tree, *streams, all_greedy=greedy)
    else:
        q_rows = proposal.nodes.q_rows
        q_rows = None if q_rows is None else pad(q_rows, (0, 0, 0, missing), value=-1)
        p_logits = process(logits, sampling.repeated(proposal.sizes))
        verdict = verify_tree(p_logits, tree, proposal.logits, q_rows, *streams)
    return torch.cat([verdict.accepted[:, None], verdict.tokens, verdict.nodes], dim=1)


RULES: dict[str, Rule] = {"chain": by_chain, "block": by_block, "tree": by_tree}


def adjusted_rows(
    proposal: RoundProposal | None, sampling: RowSampling, adjust: Adjustments
) -> AdjustedRows:
    """Rows of the logits to come. Made before the target's pass, so that drafted tokens come to the
    host while it runs."""
    sizes = [] if proposal is None else proposal.sizes
    counts = [size + 1 for size in sizes] + [1] * (len(sampling.params) - len(sizes))
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    rows, slots = sent(sampling.device, owners, [slot for one in counts for slot in range(one)])
    if proposal is None:
        return AdjustedRows(owners, rows, slots.new_empty(len(owners), 0), None)
    drafted = proposal.before(rows, slots)
    reading = Reading(drafted) if adjust.reads_tokens else None
    return AdjustedRows(owners, rows, drafted, reading)


def adjusted(logits: torch.Tensor, of: AdjustedRows | None, sampling: RowSampling) -> torch.Tensor:
    """Target logits under the requests' penalties, bans and masks; the logits themselves where no
    request asks for any."""
    if of is None or sampling.adjust is None:
        return logits
    prefixes: list[list[int]] = [[] for _ in of.owners]
    if of.reading is not None:
        found = of.reading.wait().tolist()
        prefixes = [[token for token in row if token >= 0] for row in found]
    return sampling.adjust.apply(logits, of.rows, of.drafted, of.owners, prefixes)


class Result(NamedTuple):
    emitted: list[list[int]]  # as `Round` has them
    paths: list[list[int]]
    report: list[list[int]]  # of the proposal


def read(table: torch.Tensor, proposal: RoundProposal | None) -> Result:
    """A rule's result and the proposal's report, by the round's one look at the device."""
    if proposal is None or proposal.known is not None:
        known = [] if proposal is None else proposal.known
        return Result([row[1 : row[0] + 2] for row in table.tolist()], [], known or [])
    count, width, columns = len(proposal.sizes), proposal.tokens.shape[1], table.shape[1]
    report = proposal.report
    if count < len(table):
        report = [pad(part, (0, 0, 0, len(table) - count)) for part in report]
    rows: list[list[int]] = torch.cat([table, *report], dim=1).tolist()
    emitted = [row[1 : row[0] + 2] for row in rows]
    paths = []
    if proposal.nodes is not None:
        paths = [row[2 + width : 2 + width + row[0]] for row in rows]
    return Result(emitted, paths, [row[columns:] for row in rows[:count]])


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


def settle(round: Round, *, with_distributions: bool) -> None:
    """Leave out of a round the logits of what turned out not to be usable. A tree becomes the chain
    of its kept nodes and the first one rejected after them.

    Args:
        with_distributions: keep q of such chains, which records need.
    """
    drafted, output, trees = round.drafted, round.output, round.drafted.parents
    if trees is None and sum(map(len, drafted.chains)) == sum(round.sizes):
        return
    nodes: list[Sequence[int]] = [range(len(chain)) for chain in drafted.chains]
    if trees is not None:
        nodes = [tried(parents, path) for parents, path in zip(trees, round.paths)]
    every = [*nodes, *[range(0)] * (len(round.rows) - len(nodes))]
    logit_rows: list[int] = []
    num_logits = 0
    for row, size, kept in zip(round.rows, round.sizes, every, strict=True):
        if row.samples:
            logit_rows += (num_logits + slot for slot in (0, *(node + 1 for node in kept)))
            num_logits += 1 + size
    (logits_at,) = sent(output.logits.device, logit_rows)
    round.output = output = output._replace(logits=output.logits[logits_at])
    if trees is None:
        return
    if output.taps is not None:
        tap_rows: list[int] = []
        begins: list[int] = []
        for row, begin, kept in zip(round.rows, output.begins, every, strict=True):
            begins.append(len(tap_rows))
            tap_rows += range(begin, begin + row.count)
            tap_rows += (begin + row.count + node for node in kept)
        (taps_at,) = sent(output.logits.device, tap_rows)
        round.output = output._replace(taps=output.taps[taps_at], begins=begins)
    chains = [[chain[node] for node in kept] for chain, kept in zip(drafted.chains, nodes)]
    q_logits = _path_distributions(drafted, nodes) if with_distributions else None
    round.drafted = drafted._replace(chains=chains, logits=q_logits, parents=None, q_rows=None)


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
