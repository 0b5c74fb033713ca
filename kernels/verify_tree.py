"""Tree verification: which path of a draft tree stands, and the one token after it, so that the output law is the target's.

From the root on, the children of a node are tested in order. The first child x, drawn from q, is kept when u q(x) < p(x), as
in a chain. When it is not, the law still to be met is max(p - q, 0), renormalised, and the law the next sibling was drawn from
is q without x, renormalised, because siblings are drawn without replacement; the same test follows with these two, and so on.
The first child that is kept is descended to. When all are rejected, the last residual is drawn from; at a leaf, p. Miao et al.
2024 (SpecInfer, arXiv:2305.09781), Jeon et al. 2024 (arXiv:2402.14160).

Deterministic children (no q) are the same with q = 1 at the child: x is kept with probability p(x), else p loses x.

Legend: B rows, N nodes, V vocabulary, R = sum(lengths + 1) rows of target logits, Q draft laws, M siblings.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import choose
from draftsmith.kernels.filters import clean
from draftsmith.kernels.randomness import Purpose, race, stream_keys, uniform
from draftsmith.kernels.trees import DraftTree
from draftsmith.kernels.verify import accepts, assemble, log_law, one_hot_logits, residual_law, wide


class TreeVerdict(NamedTuple):
    accepted: torch.Tensor  # [B] int64, how many drafted tokens were kept
    tokens: torch.Tensor  # [B, N + 1] int64: the kept drafts, the residual or bonus token, then -1
    nodes: torch.Tensor  # [B, N] int64: the kept nodes in order, then -1


def verify_tree(
    p_logits: torch.Tensor,
    tree: DraftTree,
    q_logits: torch.Tensor | None,
    q_rows: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    impl: str = "auto",
) -> TreeVerdict:
    """Keeps a path of each row's tree and draws the token after it.

    Args:
        p_logits: [R, V] processed target logits; row b owns `lengths[b] + 1` consecutive ones, of the root and of each node.
        tree: tokens, parents and lengths, see `DraftTree`.
        q_logits: [Q, V] processed draft logits; None when all drafting was deterministic.
        q_rows: [B, N + 1] int64: row of `q_logits` that the children of a slot (0 = root, i + 1 = node i) were drawn from
            without replacement, in their order; -1 where there are none, or where they are deterministic.
        seeds: [B] int64.
        positions: [B] int64, absolute position of a child of the root.
        impl: "auto", "triton" or "torch".

    A child that its law could not have drawn is passed over, as if it were not there: a negative token, one without mass
    in q, one that a sibling before it had. (So siblings drawn with replacement are welcome, too: the first occurrences are a
    draw without replacement.) NaN counts as -inf. A residual without mass falls back to p. When the deciding row of p is
    all -inf there is no law to draw from and the emitted token is -1. Sibling j of a node at depth d is tested with number
    j of the ACCEPT stream at position d, so that a chain is verified as `verify_chain` does.
    """
    if impl == "auto" and p_logits.dtype == torch.float64:
        impl = "torch"  # the Triton kernels compute in float32
    if choose(impl, p_logits.device) == "triton":
        from draftsmith.kernels.verify_tree_triton import verify_tree_triton

        return verify_tree_triton(p_logits, tree, q_logits, q_rows, seeds, positions)
    return verify_tree_torch(p_logits, tree, q_logits, q_rows, seeds, positions)


class Siblings(NamedTuple):
    """What is left at N nodes once some of their children were rejected; logprobs [N, V]."""

    log_p: torch.Tensor  # the law still to be met
    log_q: torch.Tensor  # the law the next child was drawn from


def offered_law(left: Siblings, tokens: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
    """[N, V] logprobs of the law each next child was drawn from: `left.log_q` where `told` [N], else 1 at the child."""
    return torch.where(told[:, None], left.log_q, one_hot_logits(tokens, left.log_p))


def reject(left: Siblings, tokens: torch.Tensor, told: torch.Tensor, log_p: torch.Tensor) -> Siblings:
    """What is left once the next children `tokens` [N] are rejected; `log_p` is the target's law, should no mass be left."""
    residual = log_law(residual_law(left.log_p, offered_law(left, tokens, told)))
    has_mass = (residual > -math.inf).any(dim=-1, keepdim=True)
    others = log_law(left.log_q.scatter(-1, tokens[:, None], -math.inf))
    return Siblings(torch.where(has_mass, residual, log_p), others)


class SiblingLaw(NamedTuple):
    """What a node's ordered children come to, exactly."""

    keep: torch.Tensor  # [M], the chance that child j is kept, once those before it were rejected
    left: torch.Tensor  # [V] logprobs of the token that follows when all are rejected


def sibling_law(log_p: torch.Tensor, log_q: torch.Tensor | None, tokens: torch.Tensor) -> SiblingLaw:
    """The test of children `tokens` [M] under the target's law log_p [V], for enumeration; log_q [V] None: deterministic."""
    told = torch.tensor([log_q is not None], device=log_p.device)
    left = Siblings(log_p[None], torch.full_like(log_p, -math.inf)[None] if log_q is None else log_q[None])
    keep = torch.zeros(len(tokens), dtype=log_p.dtype, device=log_p.device)
    for place, token in enumerate(tokens[:, None]):
        drawn_from = offered_law(left, token, told)[0, token.clamp(min=0)]
        if not bool((token >= 0) & (drawn_from > -math.inf)):
            continue
        keep[place] = (left.log_p[0, token] - drawn_from).exp().clamp(max=1)[0]
        left = reject(left, token, told, log_p[None])
    return SiblingLaw(keep, left.log_p[0])


def verify_tree_torch(
    p_logits: torch.Tensor,
    tree: DraftTree,
    q_logits: torch.Tensor | None,
    q_rows: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> TreeVerdict:
    """The reference. Computes in the dtype of the logits, float32 at least.

    One walk over the nodes in their topological order does for all rows: whichever node a row stands at, its children come
    later, in the order of their tests.
    """
    walk = _Walk(p_logits, tree)
    for node in range(tree.tokens.shape[1]):
        rows = ((node < tree.lengths) & (tree.parents[:, node] + 1 == walk.slots)).nonzero()[:, 0]
        if len(rows) == 0:
            continue
        told = torch.zeros_like(rows, dtype=torch.bool)
        if q_logits is not None and q_rows is not None:
            laws = q_rows[rows, walk.slots[rows]]
            told = laws >= 0
            fresh = told & (walk.tested[rows] == 0)
            walk.learn(rows[fresh], q_logits[laws[fresh]])
        log_u = uniform(seeds[rows], positions[rows] + walk.accepted[rows], Purpose.ACCEPT, walk.tested[rows]).log()
        walk.test(node, rows, told, log_u)
    purposes = torch.where(walk.tested > 0, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    emitted = race(walk.final_logits, stream_keys(seeds, positions + walk.accepted, purposes))
    drafts = tree.tokens.gather(1, walk.nodes.clamp(min=0))
    return TreeVerdict(walk.accepted, assemble(drafts, walk.accepted, emitted), walk.nodes)


class _Walk:
    """Where each of B rows stands, and the laws there."""

    def __init__(self, p_logits: torch.Tensor, tree: DraftTree):
        self.p_logits, self.tokens = p_logits, tree.tokens
        self.first_rows = torch.cumsum(tree.lengths + 1, 0) - (tree.lengths + 1)
        self.slots, self.accepted, self.tested = (torch.zeros_like(tree.lengths) for _ in range(3))
        self.nodes = torch.full_like(tree.tokens, -1)
        self.final_logits = clean(wide(p_logits[self.first_rows]))  # the law of the token to emit
        self.log_p = log_law(self.final_logits)
        self.left = Siblings(self.log_p.clone(), torch.full_like(self.log_p, -math.inf))

    def learn(self, rows: torch.Tensor, q_logits: torch.Tensor) -> None:
        """The laws that the children of these rows' nodes were drawn from."""
        self.left.log_q[rows] = log_law(q_logits).to(self.log_p.dtype)

    def test(self, node: int, rows: torch.Tensor, told: torch.Tensor, log_u: torch.Tensor) -> None:
        """Tests `node`, a child of the node at which each of `rows` stands."""
        tokens = self.tokens[rows, node]
        ids = tokens.clamp(min=0)
        log_q = torch.where(told, self.left.log_q[rows, ids], 0.0)
        possible = (tokens >= 0) & (log_q > -math.inf)
        keep = possible & accepts(log_u, self.left.log_p[rows, ids], log_q)
        self.tested[rows] += 1
        lost = possible & ~keep
        if bool(lost.any()):
            self._reject(rows[lost], tokens[lost], told[lost])
        if bool(keep.any()):
            self._descend(rows[keep], node)

    def _reject(self, rows: torch.Tensor, tokens: torch.Tensor, told: torch.Tensor) -> None:
        left = Siblings(self.left.log_p[rows], self.left.log_q[rows])
        self.left.log_p[rows], self.left.log_q[rows] = reject(left, tokens, told, self.log_p[rows])
        self.final_logits[rows] = self.left.log_p[rows]

    def _descend(self, rows: torch.Tensor, node: int) -> None:
        self.nodes[rows, self.accepted[rows]] = node
        self.slots[rows], self.tested[rows] = node + 1, 0
        self.accepted[rows] += 1
        self.final_logits[rows] = clean(wide(self.p_logits[self.first_rows[rows] + node + 1]))
        self.log_p[rows] = log_law(self.final_logits[rows])
        self.left.log_p[rows], self.left.log_q[rows] = self.log_p[rows], -math.inf
