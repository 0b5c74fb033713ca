"""Draft trees seen whole, for tests: prefixes, form, and the exact test of siblings;
chains verified as trees."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from draftsmith.kernels.constants import MAX_NODES
from draftsmith.kernels.verify.tree import Siblings, reject, verify_tree
from draftsmith.kernels.verify.verdict import DraftTree, TreeVerdict


def chain_tree(draft_tokens: torch.Tensor, lengths: torch.Tensor) -> DraftTree:
    """The tree of a chain [B, K]: every node under the one before it."""
    parents = torch.arange(-1, draft_tokens.shape[1] - 1, device=draft_tokens.device)
    return DraftTree(draft_tokens, parents.expand_as(draft_tokens), lengths)


def verify_as_tree(
    p: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
    q: torch.Tensor | None,
    *streams: torch.Tensor,
    verify: Callable[..., TreeVerdict] = verify_tree,
    **options: str,
) -> TreeVerdict:
    """Of chains: every node has one child. Parents and rows of distributions beyond the lengths,
    which nobody may read, are junk."""
    beyond = torch.arange(drafts.shape[1], device=p.device) >= lengths[:, None]
    rows = torch.arange(drafts.numel(), device=p.device).view(drafts.shape)
    q_rows = torch.nn.functional.pad(rows.masked_fill(beyond, 2**62), (0, 1), value=2**62)
    told = (None, None) if q is None else (q.flatten(0, 1), q_rows)
    tree = chain_tree(drafts, lengths)
    tree = tree._replace(parents=tree.parents.masked_fill(beyond, 2**62))
    return verify(p, tree, *told, *streams, **options)


def slot_prefixes(tree: DraftTree) -> list[list[list[int]]]:
    """Drafted tokens from the root to each of a row's `lengths[b] + 1` slots, the slot's own
    included."""
    prefixes = []
    for tokens, parents, length in zip(
        tree.tokens.tolist(), tree.parents.tolist(), tree.lengths.tolist()
    ):
        row: list[list[int]] = [[]]
        for token, parent in zip(tokens[:length], parents[:length]):
            row.append([*row[parent + 1], token])
        prefixes.append(row)
    return prefixes


def well_formed(tree: DraftTree) -> torch.Tensor:
    """Mask [B] of rows whose lengths and parents keep the promises of `DraftTree`."""
    num_nodes = tree.tokens.shape[1]
    places = torch.arange(num_nodes, device=tree.parents.device)
    real = places < tree.lengths[:, None]
    bad = real & ((tree.parents < -1) | (tree.parents >= places))
    sized = (tree.lengths >= 0) & (tree.lengths <= min(num_nodes, MAX_NODES))
    return sized & ~bad.any(dim=1)


class SiblingDistribution(NamedTuple):
    """Exact outcome of testing a node's ordered children."""

    keep: torch.Tensor  # [M], the chance that child j is kept, once those before it were rejected
    left: torch.Tensor  # [V] logprobs of the token that follows when all are rejected


def sibling_distribution(
    log_p: torch.Tensor, log_q: torch.Tensor | None, tokens: torch.Tensor
) -> SiblingDistribution:
    """The test of children `tokens` [M] under the target's distribution log_p [V], for enumeration;
    log_q [V] None: deterministic."""
    is_drawn = torch.tensor([log_q is not None], device=log_p.device)
    left = Siblings(log_p[None], None if log_q is None else log_q[None])
    keep = torch.zeros(len(tokens), dtype=log_p.dtype, device=log_p.device)
    for place, token in enumerate(tokens[:, None]):
        drawn = 0.0 if left.log_q is None else float(left.log_q[0, token])
        if int(token) < 0 or drawn == -math.inf:
            continue
        keep[place] = (left.log_p[0, token] - drawn).exp().clamp(max=1)[0]
        left = reject(left, token, is_drawn)
        if not bool((left.log_p > -math.inf).any()):
            left = Siblings(log_p[None], left.log_q)
    return SiblingDistribution(keep, left.log_p[0])
