"""Exact enumeration: every outcome of one round of the kernels as they ship, in float64, summed up
to a distribution.

A round of depth K emits up to K + 1 tokens; what it leaves open of them is filled up by the target.
The distribution of those K + 1 tokens must then be the target's. `enumerate.py` calls the
verification; this module holds which, and on what.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.residual import log_distribution, residual_distribution
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import DraftTree, TreeVerdict, Verdict
from tests.kernel_audit.enumerate import (
    Chosen,
    Drafts,
    all_drafts,
    round_distribution,
    target_distribution,
)
from tests.kernel_audit.world import START, Distribution, World

EXACT_ERROR = 1e-12

VerifyChain = Callable[..., Verdict]
VerifyTree = Callable[..., TreeVerdict]


@dataclass(frozen=True)
class Shape:
    """Shape of a round's drafts: nodes under their parents, over a vocabulary small enough to
    enumerate."""

    parents: tuple[int, ...]
    depth: int
    siblings: int
    vocab_size: int

    def world(self, distribution: Distribution, seed: int) -> World:
        return distribution.world(self.vocab_size, seed)


CHAIN = Shape((-1, 0, 1), depth=3, siblings=1, vocab_size=4)
TREES = {
    "tree, children under every child": Shape(
        (-1, -1, 0, 0, 1, 1), depth=2, siblings=2, vocab_size=3
    ),
    "tree, three siblings": Shape((-1, -1, -1, 1), depth=2, siblings=3, vocab_size=4),
    "tree, three levels": Shape((-1, -1, 0, 1, 1, 3), depth=3, siblings=2, vocab_size=3),
}
DISTRIBUTIONS = (
    Distribution(name="true q"),
    Distribution(name="filtered", temperature=0.8, top_k=2),
    Distribution(name="draft without filters", top_p=0.7, draft_filtered=False),
    Distribution(name="deterministic", deterministic=True),
)


def chain_error(
    distribution: Distribution, seed: int, *, verify: VerifyChain = verify_chain
) -> float:
    """Largest error of a probability of the K + 1 tokens of a round; `verify` takes `draws`, and a
    control has its own."""
    return _chain_error(distribution, seed, verify, shape=(CHAIN.depth, 1))


def block_error(
    distribution: Distribution, seed: int, *, verify: VerifyChain = verify_block
) -> float:
    return _chain_error(distribution, seed, verify, shape=(1, CHAIN.depth))


def _chain_error(
    distribution: Distribution, seed: int, verify: VerifyChain, *, shape: tuple[int, int]
) -> float:
    world = CHAIN.world(distribution, seed)
    drafts = all_drafts(world, CHAIN.parents, deterministic=distribution.deterministic)

    def decide(rows: torch.Tensor, draws: Chosen) -> Verdict:
        return verify(
            *chain_arguments(
                world, drafts, rows, numbered(rows), deterministic=distribution.deterministic
            ),
            draws=draws,
        )

    return _error(
        world,
        round_distribution(world, drafts, decide, depth=CHAIN.depth, numbers=shape),
        CHAIN.depth,
    )


def tree_error(
    distribution: Distribution,
    seed: int,
    shape: Shape = TREES["tree, children under every child"],
    *,
    verify: VerifyTree = verify_tree,
) -> float:
    world = shape.world(distribution, seed)
    drafts = all_drafts(world, shape.parents, deterministic=distribution.deterministic)

    def decide(rows: torch.Tensor, draws: Chosen) -> TreeVerdict:
        return verify(
            *tree_arguments(
                world, drafts, rows, numbered(rows), deterministic=distribution.deterministic
            ),
            draws=draws,
        )

    numbers = shape.depth, shape.siblings
    return _error(
        world,
        round_distribution(world, drafts, decide, depth=shape.depth, numbers=numbers),
        shape.depth,
    )


def _error(world: World, distribution: torch.Tensor, depth: int) -> float:
    error = float((distribution - target_distribution(world, START, depth + 1)).abs().max())
    return math.inf if math.isnan(error) else error


def chain_arguments(
    world: World, drafts: Drafts, rows: torch.Tensor, seeds: torch.Tensor, *, deterministic: bool
) -> tuple[torch.Tensor | None, ...]:
    """Arguments of `verify_chain` in float64 for drafts [C] by their numbers, with seeds [C], at
    position 0."""
    tokens, contexts = drafts.tokens[rows], drafts.contexts[rows]
    p_logits = world.p_logits.double()[contexts].flatten(0, 1)
    q_logits = None if deterministic else world.q_logits.double()[contexts[:, :-1]]
    return (
        p_logits,
        tokens,
        torch.full_like(seeds, tokens.shape[1]),
        q_logits,
        seeds,
        torch.zeros_like(seeds),
    )


def tree_arguments(
    world: World, drafts: Drafts, rows: torch.Tensor, seeds: torch.Tensor, *, deterministic: bool
) -> tuple[torch.Tensor | DraftTree | None, ...]:
    """The same of `verify_tree`."""
    tokens, contexts = drafts.tokens[rows], drafts.contexts[rows]
    tree = DraftTree(
        tokens,
        torch.tensor(drafts.parents).expand_as(tokens),
        torch.full_like(seeds, tokens.shape[1]),
    )
    distributions = (None, None) if deterministic else (world.q_logits.double(), contexts)
    return (
        world.p_logits.double()[contexts].flatten(0, 1),
        tree,
        *distributions,
        seeds,
        torch.zeros_like(seeds),
    )


def numbered(rows: torch.Tensor) -> torch.Tensor:
    """Seeds by which `Chosen` distinguishes rows."""
    return torch.arange(len(rows))


def without_residual(
    p_logits: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    draws: Chosen,
) -> Verdict:
    verdict = verify_chain(p_logits, drafts, lengths, q_logits, seeds, positions, draws=draws)
    draws.token(by_target(p_logits, lengths, verdict.accepted), seeds, positions, seeds)
    return verdict


def with_chains_residual(
    p_logits: torch.Tensor,
    drafts: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    draws: Chosen,
) -> Verdict:
    verdict = verify_block(p_logits, drafts, lengths, q_logits, seeds, positions, draws=draws)
    draws.token(
        by_chains_residual(p_logits, lengths, q_logits, verdict.accepted), seeds, positions, seeds
    )
    return verdict


def with_warmer_q(
    p_logits: torch.Tensor,
    tree: DraftTree,
    q_logits: torch.Tensor,
    *rest: torch.Tensor,
    draws: Chosen,
) -> TreeVerdict:
    """Siblings verified as drawn from a flatter distribution than they were."""
    return verify_tree(p_logits, tree, q_logits * 0.5, *rest, draws=draws)


def by_target(
    p_logits: torch.Tensor, lengths: torch.Tensor, accepted: torch.Tensor
) -> torch.Tensor:
    """[B, V], the target's logits behind the kept drafts."""
    return p_logits[torch.cumsum(lengths + 1, 0) - 1 - lengths + accepted]


def by_chains_residual(
    p_logits: torch.Tensor, lengths: torch.Tensor, q_logits: torch.Tensor, accepted: torch.Tensor
) -> torch.Tensor:
    """[B, V]: max(p - q, 0) behind the kept drafts, where a block has max(r p - q, 0); p behind the
    last draft."""
    logits = by_target(p_logits, lengths, accepted)
    cut = accepted < lengths
    rows = torch.arange(len(lengths), device=lengths.device)[cut]
    log_p, log_q = (log_distribution(one) for one in (logits[cut], q_logits[rows, accepted[cut]]))
    residual = residual_distribution(log_p, log_q)
    has_mass = (residual > -math.inf).any(dim=-1, keepdim=True)
    logits[cut] = torch.where(has_mass, residual, logits[cut]).to(logits.dtype)
    return logits
