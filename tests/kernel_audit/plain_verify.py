"""Tree verification read plainly, with its rules taken apart so that the audit can break them one
by one.

With the rules as they are by default it decides what `kernels/verify/tree.py` decides, which a test
holds; it is no faster and no more general, and nothing is served by it. Every node's children are
drawn; a chain is a tree whose nodes have one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.kernels.sampling.random_streams import STREAMS, Purpose
from draftsmith.kernels.verify.draft_tree import DraftTree, chain_tree
from draftsmith.kernels.verify.residual import (
    accepts,
    assemble,
    log_distribution,
    residual_distribution,
)
from draftsmith.kernels.verify.verdict import TreeVerdict, Verdict


class Left(NamedTuple):
    """Distributions left at a node once some of its children were rejected; logprobs [B, V]."""

    log_p: torch.Tensor
    log_q: torch.Tensor


def reject_sibling(left: Left, tokens: torch.Tensor) -> Left:
    """Remove from p the mass that q covers; the next sibling is drawn from q without this one."""
    log_q = log_distribution(left.log_q.scatter(-1, tokens[:, None], -math.inf))
    return Left(log_distribution(residual_distribution(left.log_p, left.log_q)), log_q)


@dataclass(frozen=True, kw_only=True)
class Rules:
    uniform: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = STREAMS.uniform
    token: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = (
        STREAMS.token
    )
    accept: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = accepts
    reject: Callable[[Left, torch.Tensor], Left] = reject_sibling
    passes_over_repeats: bool = True  # a token that q can no longer give is not tested


def verify_tree_by(
    rules: Rules,
    p_logits: torch.Tensor,
    tree: DraftTree,
    q_logits: torch.Tensor,
    q_rows: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> TreeVerdict:
    log_p, log_q = log_distribution(p_logits), log_distribution(q_logits)
    first_rows = torch.cumsum(tree.lengths + 1, 0) - (tree.lengths + 1)
    slots, accepted, tested = (torch.zeros_like(tree.lengths) for _ in range(3))
    nodes = torch.full_like(tree.tokens, -1)
    columns = torch.arange(nodes.shape[1], device=nodes.device)
    left = Left(log_p[first_rows], log_q[q_rows[:, 0]])
    for node in range(tree.tokens.shape[1]):
        here = (node < tree.lengths) & (tree.parents[:, node] + 1 == slots)
        tokens = tree.tokens[:, node].clamp(min=0)
        reported_p, reported_q = (
            distribution.gather(-1, tokens[:, None])[:, 0] for distribution in left
        )
        real = here & (tree.tokens[:, node] >= 0)
        if rules.passes_over_repeats:
            real &= reported_q > -math.inf
        log_u = rules.uniform(seeds, positions + accepted, tested).log()
        keep = real & rules.accept(log_u, reported_p, reported_q)
        tested += here.long()
        lost = (real & ~keep)[:, None]
        after = rules.reject(left, tokens)
        # Where rounding leaves no mass the target's own distribution stands in.
        whole = log_p[first_rows + slots]
        rest = torch.where((after.log_p > -math.inf).any(dim=-1, keepdim=True), after.log_p, whole)
        left = Left(torch.where(lost, rest, left.log_p), torch.where(lost, after.log_q, left.log_q))
        nodes = torch.where(keep[:, None] & (columns == accepted[:, None]), node, nodes)
        slots, accepted, tested = (
            torch.where(keep, node + 1, slots),
            accepted + keep.long(),
            torch.where(keep, 0, tested),
        )
        below = log_q[q_rows.gather(1, slots[:, None])[:, 0]]
        left = Left(
            torch.where(keep[:, None], log_p[first_rows + slots], left.log_p),
            torch.where(keep[:, None], below, left.log_q),
        )
    purposes = torch.where(tested > 0, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    emitted = rules.token(left.log_p, seeds, positions + accepted, purposes)
    drafts = tree.tokens.gather(1, nodes.clamp(min=0))
    return TreeVerdict(accepted, assemble(drafts, accepted, emitted), nodes)


def verify_chain_by(
    rules: Rules,
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> Verdict:
    size, depth = draft_tokens.shape
    q_rows = torch.arange(size * depth, device=seeds.device).view(size, depth)
    q_rows = torch.nn.functional.pad(q_rows, (0, 1), value=-1)
    tree = chain_tree(draft_tokens, lengths)
    verdict = verify_tree_by(
        rules, p_logits, tree, q_logits.flatten(0, 1), q_rows, seeds, positions
    )
    return Verdict(verdict.accepted, verdict.tokens)
