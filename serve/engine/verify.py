"""Verification of a round: from target logits to emitted tokens, by each request's
distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from draftsmith.kernels.dispatch import read_at_once, reads_freely, sent
from draftsmith.kernels.sampling.draw import draw
from draftsmith.kernels.sampling.filters import process
from draftsmith.kernels.sampling.random_streams import Purpose
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.chain_compiled import Drafts, verify_chain_compiled
from draftsmith.kernels.verify.chain_logits import takes_rounds, verify_logits
from draftsmith.kernels.verify.draft_tree import DraftTree, paths
from draftsmith.kernels.verify.lossy import verify_synthetic, verify_typical
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import Verdict
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.round import (
    RoundProposal,
    RoundTree,
    RowSampling,
    UnreadDrafts,
    VerifyOutput,
)
from draftsmith.serve.engine.trees import greedy_path
from draftsmith.serve.sampling.adjustments import chain_prefixes, tree_prefixes


class ChainRule(NamedTuple):
    """Verification rule of a chain."""

    verify: Callable[..., Verdict]
    # For greedy rows the rule keeps drafted tokens exactly while they are the argmax.
    argmax: bool = True

    def decides_as_chain(self, sampling: RowSampling) -> bool:
        """True for rows where it is the rule of a chain."""
        return self.verify is verify_chain or (self.argmax and sampling.all_greedy)


CHAIN_RULES = {
    "chain": ChainRule(verify_chain),
    "block": ChainRule(verify_block),
    "typical": ChainRule(verify_typical),  # lossy
}


def rule_name(config: EngineConfig, *, trees: bool) -> str:
    """Rule of the engine's rounds, as their records name it."""
    if config.synthetic_acceptance is not None:
        return "synthetic"
    return "tree" if trees else config.verification


def chain_rule(verification: str, synthetic_acceptance: Sequence[float] | None) -> ChainRule:
    if synthetic_acceptance is None:
        return CHAIN_RULES[verification]
    return ChainRule(partial(verify_synthetic, rates=synthetic_acceptance), argmax=False)


def verify_round(
    logits: torch.Tensor,
    chains: Sequence[Sequence[int]],
    proposal: RoundProposal | None,
    sampling: RowSampling,
    rule: ChainRule = CHAIN_RULES["chain"],
) -> VerifyOutput:
    """Accepted tokens of every row, and the token after them.

    Args:
        logits: [R, V] raw; row b owns `len(chains[b]) + 1` of them.
        chains: the drafted tokens of every deciding row, in a tree's order where it drafted one.
        proposal: of the first rows, None when nothing was drafted.
    """
    tree = None if proposal is None else proposal.tree
    parents = None if tree is None else tree.parents + [[]] * (len(chains) - len(tree.parents))
    if sampling.adjust is not None and proposal is not None and proposal.unread is not None:
        logits = sampling.adjust.apply_late(logits, *_late_prefixes(chains, proposal))
    elif sampling.adjust is not None:
        owners, prefixes = (
            chain_prefixes(chains) if parents is None else tree_prefixes(chains, parents)
        )
        logits = sampling.adjust.apply(logits, owners, prefixes)
    if tree is None and decides_late(sampling):
        return _verify_at_once(logits, chains, proposal, sampling, rule)
    if proposal is not None and tree is not None and proposal.unread is not None:
        return _verify_trees_at_once(logits, chains, proposal, proposal.unread, tree, sampling)
    if (
        sampling.all_greedy
        and rule.argmax
        and (verified := _verify_greedily(logits, chains, parents)) is not None
    ):
        return verified
    if (
        rule.verify is verify_chain
        and tree is None
        and (verified := _verify_compiled(logits, proposal, sampling)) is not None
    ):
        return verified
    counts = [len(chain) + 1 for chain in chains]
    rows = sampling.repeated(counts)
    verified = VerifyOutput([], [])
    num_drafting = len(proposal.chains) if proposal is not None else 0
    num_rows = sum(counts[:num_drafting])
    if proposal is not None:
        seeds, positions = sampling.seeds[:num_drafting], sampling.positions[:num_drafting]
        p_logits = process(logits[:num_rows], rows.select(slice(num_rows)))
        verified = _verify(p_logits, proposal, seeds, positions, rule)
    if num_drafting < len(counts):
        # Nothing was drafted for these rows: their token is a bonus token.
        seeds, positions = sampling.seeds[num_drafting:], sampling.positions[num_drafting:]
        rest = rows.select(slice(num_rows, None))
        bonus = draw(logits[num_rows:], rest, seeds, positions, Purpose.BONUS).tokens
        verified.emitted.extend([token] for token in bonus.tolist())
        if tree is not None:
            verified.paths.extend([] for _ in bonus)
    return verified


def _late_prefixes(
    chains: Sequence[Sequence[int]], proposal: RoundProposal
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[list[int]]]:
    """(owner [R], drafted tokens before it [R, K], -1 in other places, the owners on the host, the
    drafted tokens there) of every row of logits; the last are empty where the host does not read
    them. Of `chains` the lengths alone count; the first are the proposal's."""
    tokens = proposal.tokens
    counts = [len(chain) + 1 for chain in chains]
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    places = [place for count in counts for place in range(count)]
    rows, before = sent(tokens.device, owners, places)
    # Behind the rows that draft are some that do not.
    drafting = rows.clamp(max=len(tokens) - 1)
    if proposal.tree is not None:
        drafted = paths(proposal.tree.draft)[drafting, before]
    else:
        known = torch.arange(tokens.shape[1], device=tokens.device) < before[:, None]
        drafted = tokens[drafting].masked_fill(~known, -1)
    return rows, drafted, owners, _host_prefixes(chains, proposal)


def _host_prefixes(chains: Sequence[Sequence[int]], proposal: RoundProposal) -> list[list[int]]:
    if proposal.unread is None or proposal.unread.coming is None:
        return []
    rows: list[list[int]] = proposal.unread.coming.wait().tolist()
    rows += [[]] * (len(chains) - len(rows))
    drafted = [row[: len(chain)] for row, chain in zip(rows, chains, strict=True)]
    if proposal.tree is None:
        return chain_prefixes(drafted).drafted
    width = proposal.tokens.shape[1]
    # Behind a node that hangs nowhere no distribution is read.
    parents = [
        [max(parent, -1) for parent in row[width : width + len(chain)]]
        for row, chain in zip(rows, chains, strict=True)
    ]
    return tree_prefixes(drafted, parents).drafted


def decides_late(sampling: RowSampling) -> bool:
    """True where a round is decided without a look at the device before its result."""
    return takes_rounds(sampling.device)


def _verify_at_once(
    logits: torch.Tensor,
    chains: Sequence[Sequence[int]],
    proposal: RoundProposal | None,
    sampling: RowSampling,
    rule: ChainRule,
) -> VerifyOutput:
    """Chains that may be unread: one copy from the device has their report and the result."""
    report = None if proposal is None or proposal.unread is None else proposal.unread.report
    if proposal is None or rule.decides_as_chain(sampling):
        drafts = None if proposal is None else _drafts(proposal)
        verdicts = verify_logits(
            logits, sampling.distributions(), drafts, sampling.seeds, sampling.positions
        )
    else:
        verdicts = _verdicts(logits, chains, proposal, sampling, rule)
    host_rows: list[list[int]]
    if report is None:
        host_rows, reported = verdicts.tolist(), None
    else:
        # Each row's part of the report behind its part of the verdict; the report's rows are fewer.
        padded = pad(report, (0, 0, 0, len(chains) - len(report)))
        width = verdicts.shape[1]
        both: list[list[int]] = torch.cat([verdicts, padded], dim=1).tolist()
        host_rows, reported = both, [row[width:] for row in both[: len(report)]]
    return VerifyOutput([row[1 : row[0] + 2] for row in host_rows], [], reported)


def _drafts(proposal: RoundProposal) -> Drafts:
    rooms = None if proposal.unread is None else proposal.unread.rooms
    return Drafts(proposal.tokens, proposal.lengths, proposal.logits, rooms)


def _verdicts(
    logits: torch.Tensor,
    chains: Sequence[Sequence[int]],
    proposal: RoundProposal,
    sampling: RowSampling,
    rule: ChainRule,
) -> torch.Tensor:
    """As `verify_logits`, by another rule than a chain's. Of `chains` the lengths alone count."""
    drafts, num_drafting = _drafts(proposal), len(proposal.chains)
    counts = [len(chain) + 1 for chain in chains]
    num_rows = sum(counts[:num_drafting])
    rows = sampling.repeated(counts)
    seeds, positions = sampling.seeds, sampling.positions
    verdict = rule.verify(
        process(logits[:num_rows], rows.select(slice(num_rows))),
        drafts.tokens,
        drafts.lengths,
        drafts.logits,
        seeds[:num_drafting],
        positions[:num_drafting],
        room=drafts.room,
    )
    verdicts = torch.cat([verdict.accepted[:, None], verdict.tokens], dim=1)
    if num_drafting == len(counts):
        return verdicts
    rest = verify_logits(
        logits[num_rows:],
        rows.select(slice(num_rows, None)),
        None,
        seeds[num_drafting:],
        positions[num_drafting:],
    )
    return torch.cat([verdicts, pad(rest, (0, verdicts.shape[1] - rest.shape[1]), value=-1)])


def _verify_trees_at_once(
    logits: torch.Tensor,
    chains: Sequence[Sequence[int]],
    proposal: RoundProposal,
    unread: UnreadDrafts,
    tree: RoundTree,
    sampling: RowSampling,
) -> VerifyOutput:
    """Trees whose parents are on the device alone: one copy from it has them and the result."""
    draft, q_rows = tree.draft, tree.q_rows
    if sampling.all_greedy:
        (choices, finite), tokens, parents, report = read_at_once(
            _choices(logits), draft.tokens, draft.parents, unread.report
        )
        if all(finite):
            grown = [row[: len(own)] for row, own in zip(parents, tree.parents, strict=True)]
            grown += [[]] * (len(chains) - len(grown))
            drafted = [row[: len(own)] for row, own in zip(tokens, chains)]
            drafted += [[]] * (len(chains) - len(drafted))
            return _chosen(choices, drafted, grown)._replace(report=report)
    missing = len(chains) - len(draft.tokens)
    rows = sampling.repeated([len(chain) + 1 for chain in chains])
    whole = DraftTree(
        pad(draft.tokens, (0, 0, 0, missing)),
        pad(draft.parents, (0, 0, 0, missing)),
        pad(draft.lengths, (0, missing)),
    )
    q_rows = None if q_rows is None else pad(q_rows, (0, 0, 0, missing), value=-1)
    verdict = verify_tree(
        process(logits, rows), whole, proposal.logits, q_rows, sampling.seeds, sampling.positions
    )
    (accepted,), tokens, nodes, report = read_at_once(
        verdict.accepted[None], verdict.tokens, verdict.nodes, unread.report
    )
    emitted = [row[: count + 1] for row, count in zip(tokens, accepted)]
    return VerifyOutput(emitted, [row[:count] for row, count in zip(nodes, accepted)], report)


def _verify_compiled(
    logits: torch.Tensor, proposal: RoundProposal | None, sampling: RowSampling
) -> VerifyOutput | None:
    """Chains from raw logits by one call; None where that is not to be had."""
    if not reads_freely(logits.device):
        return None
    drafts = None
    if proposal is not None:
        drafts = Drafts(proposal.tokens, proposal.lengths, proposal.logits)
    emitted = verify_chain_compiled(logits, sampling.distributions(), drafts, sampling.streams)
    return None if emitted is None else VerifyOutput(emitted, [])


def _verify(
    p_logits: torch.Tensor,
    proposal: RoundProposal,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    rule: ChainRule,
) -> VerifyOutput:
    if proposal.tree is None:
        result = rule.verify(
            p_logits, proposal.tokens, proposal.lengths, proposal.logits, seeds, positions
        )
        parts = [result.accepted[:, None], result.tokens]
    else:
        tree_result = verify_tree(
            p_logits, proposal.tree.draft, proposal.logits, proposal.tree.q_rows, seeds, positions
        )
        parts = [tree_result.accepted[:, None], tree_result.tokens, tree_result.nodes]
    width = parts[1].shape[1]
    # The round's one copy of the result from the device.
    host_rows: list[list[int]] = torch.cat(parts, dim=1).tolist()
    emitted = [row[1 : row[0] + 2] for row in host_rows]
    paths = (
        [] if proposal.tree is None else [row[1 + width : 1 + width + row[0]] for row in host_rows]
    )
    return VerifyOutput(emitted, paths)


def _verify_greedily(
    logits: torch.Tensor, chains: Sequence[Sequence[int]], parents: Sequence[Sequence[int]] | None
) -> VerifyOutput | None:
    """Verification of one-hot distributions: drafted tokens are kept while they are the argmax.
    None when a logit is NaN.

    The common case on a small machine, and several times cheaper than making the distributions.
    """
    if reads_freely(logits.device):
        best = logits.max(dim=-1)  # the first of equal logits, as `process` takes it
        choices, finite = best.indices.tolist(), map(math.isfinite, best.values.tolist())
    else:
        # One copy from the device.
        choices, finite = _choices(logits).tolist()
    return _chosen(choices, chains, parents) if all(finite) else None


def _choices(logits: torch.Tensor) -> torch.Tensor:
    """[2, R] int64: the likeliest tokens, the first of equal ones, and 1 where they are finite."""
    best = logits.max(dim=-1)
    return torch.stack([best.indices, torch.isfinite(best.values).long()])


def _chosen(
    choices: list[int],
    chains: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]] | None,
) -> VerifyOutput:
    """Keep of chains, or of trees, what the target's `choices` [R] are."""
    verified = VerifyOutput([], [])
    begin = 0
    for row, chain in enumerate(chains):
        own = choices[begin : begin + len(chain) + 1]
        begin += len(own)
        if parents is None:
            kept = 0
            while kept < len(chain) and chain[kept] == own[kept]:
                kept += 1
            verified.emitted.append(own[: kept + 1])
        else:
            path = greedy_path(chain, parents[row], own)
            verified.paths.append(path)
            verified.emitted.append([own[slot] for slot in (0, *(node + 1 for node in path))])
    return verified
