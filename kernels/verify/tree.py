"""Tree verification: which path of a draft tree stands, and the one token after it, so that the
output distribution is the target's.

From the root on, the children of a node are tested in order. The first child x, drawn from q, is
kept when u q(x) < p(x), as in a chain. When it is not, the distribution still to be met is max(p -
q, 0), renormalised, and the distribution the next sibling was drawn from is q without x,
renormalised, because siblings are drawn without replacement; the same test follows with these two,
and so on. The first child that is kept is descended to. When all are rejected, the last residual is
drawn from; at a leaf, p. Miao et al. 2024 (SpecInfer, arXiv:2305.09781), Jeon et al. 2024
(arXiv:2402.14160).

Deterministic children (no q) are the same with q = 1 at the child: x is kept with probability p(x),
else p loses x.

Legend: B rows, N nodes, V vocabulary, R = sum(lengths + 1) rows of target logits, Q draft
distributions, M siblings.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from draftsmith.kernels.constants import MAX_NODES
from draftsmith.kernels.dispatch import operation, reads_freely
from draftsmith.kernels.sampling.filters import SamplingRows, clean, process
from draftsmith.kernels.sampling.random_streams import STREAMS, Draws, Purpose
from draftsmith.kernels.verify.chain import UNDECIDED, compiled_verdicts
from draftsmith.kernels.verify.residual import (
    accepts,
    assemble,
    log_distribution,
    residual_distribution,
    rows_before,
    wide,
)
from draftsmith.kernels.verify.verdict import Drafts, DraftTree, TreeVerdict, ancestors


def verify_tree_greedy(logits: torch.Tensor, tree: DraftTree) -> TreeVerdict:
    """`verify_tree` of rows at temperature 0, from raw logits: from the root down to the first
    child that is the target's likeliest token, while there is one."""
    choices, first_rows = _likeliest(logits), rows_before(tree.lengths, None)
    nodes = torch.arange(tree.tokens.shape[1], device=logits.device)
    real = (nodes < tree.lengths[:, None]) & (tree.parents >= -1) & (tree.tokens >= 0)
    rows = first_rows[:, None] + torch.where(real, tree.parents + 1, 0)
    chosen = real & (tree.tokens == choices[rows])
    beside = (tree.parents[:, :, None] == tree.parents[:, None]) & (nodes[:, None] > nodes)
    chosen &= ~(beside & chosen[:, None]).any(dim=2)
    passed = (chosen << (nodes + 1)).sum(dim=1, keepdim=True) | 1
    kept = chosen & (ancestors(tree) & ~passed == 0)
    path = torch.where(kept, nodes, MAX_NODES).sort(dim=1).values
    path = torch.where(path < MAX_NODES, path, -1)
    accepted = kept.sum(dim=1)
    last = torch.nn.functional.pad(path + 1, (1, 0)).amax(dim=1)
    drafts = tree.tokens.gather(1, path.clamp(min=0))
    return TreeVerdict(accepted, assemble(drafts, accepted, choices[first_rows + last]), path)


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """[R] int64, the first of the likeliest tokens; -1 of a row without mass."""
    best = logits.max(dim=-1)
    # Where that look would be a wait, all of it is done.
    if not (reads_freely(logits.device) and bool(best.values.isfinite().all())):
        best = clean(wide(logits)).max(dim=-1)
    return torch.where(best.values == -math.inf, -1, best.indices)


@operation
def verify_sure_tree(
    logits: torch.Tensor,
    rows: SamplingRows,
    tree: DraftTree,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    all_greedy: bool,
    impl: str = "auto",
) -> TreeVerdict:
    """`verify_tree` of deterministic children, from raw logits [R, V] under the requests'
    distributions `rows`; `all_greedy` says that all are at temperature 0."""
    if all_greedy:
        return verify_tree_greedy(logits, tree)
    own = torch.repeat_interleave(tree.lengths + 1, output_size=len(logits))
    return verify_tree(process(logits, rows.select(own)), tree, None, None, seeds, positions)


def verify_sure_tree_compiled(
    logits: torch.Tensor,
    rows: SamplingRows,
    tree: DraftTree,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    all_greedy: bool,
) -> TreeVerdict | None:
    """As `verify_sure_tree`; None where a rounding of torch's might decide on a row, and where
    there is no compiler."""
    drafts, width = Drafts(tree.tokens, tree.lengths, None, tree.lengths), tree.tokens.shape[1] + 2
    found = compiled_verdicts(logits, rows, drafts, tree.parents, seeds, positions)
    if found is None or UNDECIDED in found[:, 0].tolist():
        return None
    return TreeVerdict(found[:, 0], found[:, 1:width], found[:, width:])


class Siblings(NamedTuple):
    """Distributions left at N nodes once some of their children were rejected; logprobs [N, V]."""

    log_p: torch.Tensor  # the distribution still to be met; -inf everywhere where no mass is left
    # the distribution the next child was drawn from; None when no node's children were drawn
    log_q: torch.Tensor | None


def reject(left: Siblings, tokens: torch.Tensor, is_drawn: torch.Tensor) -> Siblings:
    """Distributions left once the next children `tokens` [N] are rejected. `is_drawn` [N] marks
    nodes whose children were drawn, from `left.log_q`."""
    log_p = left.log_p.scatter(-1, tokens[:, None], -math.inf)
    if left.log_q is None:
        return Siblings(log_distribution(log_p), None)
    log_p = torch.where(is_drawn[:, None], residual_distribution(left.log_p, left.log_q), log_p)
    return Siblings(
        log_distribution(log_p),
        log_distribution(left.log_q.scatter(-1, tokens[:, None], -math.inf)),
    )


@operation
def verify_tree(
    p_logits: torch.Tensor,
    tree: DraftTree,
    q_logits: torch.Tensor | None,
    q_rows: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    draws: Draws = STREAMS,
    impl: str = "auto",
) -> TreeVerdict:
    """Keeps a path of each row's tree and draws the token after it.

    Args:
        p_logits: [R, V] processed target logits; row b owns `lengths[b] + 1` consecutive ones, of
        the root and of each node.
        tree: tokens, parents and lengths, see `DraftTree`.
        q_logits: [Q, V] processed draft logits; None when all drafting was deterministic.
        q_rows: [B, N + 1] int64: row of `q_logits` that the children of a slot (0 = root, i + 1 =
        node i) were drawn from
            without replacement, in their order; -1 where there are none, or where they are
            deterministic.
        seeds: [B] int64.
        positions: [B] int64, absolute position of a child of the root.
        draws: source of random numbers; the reference alone takes another than its own.

    A child that its distribution could not have drawn is passed over, as if it were not there: a
    negative token, one without mass in q, one that a sibling before it had. (So siblings drawn with
    replacement are welcome, too: the first occurrences are a draw without replacement.) NaN counts
    as -inf. A residual without mass falls back to p. When the deciding row of p is all -inf there
    is no distribution to draw from and the emitted token is -1. Sibling j of a node at depth d is
    tested with number j of the ACCEPT stream at position d, so that a chain is verified as
    `verify_chain` does.

    Computes in the dtype of the logits, float32 at least. One walk over the nodes in their
    topological order does for all rows: whichever node a row stands at, its children come later, in
    the order of their tests.
    """
    walk = _Walk(p_logits, tree, q_logits, q_rows)
    lengths, parents = tree.lengths.tolist(), tree.parents.tolist()
    for node in range(tree.tokens.shape[1]):
        here = [
            row
            for row, slot in enumerate(walk.slots)
            if node < lengths[row] and parents[row][node] + 1 == slot
        ]
        if here:
            rows = torch.tensor(here, device=p_logits.device)
            log_u = draws.uniform(
                seeds[rows], positions[rows] + walk.accepted[rows], walk.tested[rows]
            ).log()
            walk.test(node, rows, log_u)
    purposes = torch.where(walk.tested > 0, int(Purpose.RESIDUAL), int(Purpose.BONUS))
    emitted = draws.token(walk.final_logits(), seeds, positions + walk.accepted, purposes)
    drafts = tree.tokens.gather(1, walk.nodes.clamp(min=0))
    return TreeVerdict(walk.accepted, assemble(drafts, walk.accepted, emitted), walk.nodes)


class _Walk:
    """Node that each of B rows has reached, and the distributions left there once its children are
    tested."""

    def __init__(
        self,
        p_logits: torch.Tensor,
        tree: DraftTree,
        q_logits: torch.Tensor | None,
        q_rows: torch.Tensor | None,
    ):
        self.p_logits, self.tokens, self.q_logits, self.q_rows = (
            p_logits,
            tree.tokens,
            q_logits,
            q_rows,
        )
        self.slots = [0] * len(tree.lengths)
        self.p_rows = torch.cumsum(tree.lengths + 1, 0) - (tree.lengths + 1)
        self.accepted, self.tested = torch.zeros_like(tree.lengths), torch.zeros_like(tree.lengths)
        self.nodes = torch.full_like(tree.tokens, -1)
        self.is_drawn, self.lost = (
            torch.zeros_like(tree.lengths, dtype=torch.bool) for _ in range(2)
        )
        dtype = torch.promote_types(p_logits.dtype, torch.float32)
        # A row is filled when the first child of its node is tested: most nodes have none.
        self.log_p = torch.zeros(
            len(self.slots), p_logits.shape[-1], dtype=dtype, device=p_logits.device
        )
        self.log_q = None if q_logits is None or q_rows is None else torch.zeros_like(self.log_p)

    def test(self, node: int, rows: torch.Tensor, log_u: torch.Tensor) -> None:
        """Tests `node`, a child of the node at which each of `rows` stands."""
        fresh = self.tested[rows] == 0
        if bool(fresh.any()):
            self._arrive(rows[fresh])
        tokens = self.tokens[rows, node]
        ids = tokens.clamp(min=0)
        log_q = (
            torch.zeros_like(log_u)
            if self.log_q is None
            else torch.where(self.is_drawn[rows], self.log_q[rows, ids], 0.0)
        )
        possible = (tokens >= 0) & (log_q > -math.inf)
        keep = possible & accepts(log_u, self.log_p[rows, ids], log_q)
        self.tested[rows] += 1
        lost = possible & ~keep
        if bool(lost.any()):
            self._reject(rows[lost], tokens[lost])
        if bool(keep.any()):
            self._descend(rows[keep], node)

    def final_logits(self) -> torch.Tensor:
        """[B, V], the distribution of each row's next token."""
        logits = clean(wide(self.p_logits[self.p_rows]))
        logits[self.lost] = self.log_p[self.lost]
        return logits

    def _arrive(self, rows: torch.Tensor) -> None:
        self.log_p[rows] = log_distribution(self.p_logits[self.p_rows[rows]])
        if self.q_logits is None or self.q_rows is None or self.log_q is None:
            return
        distributions = self.q_rows[rows, torch.tensor(self.slots, device=rows.device)[rows]]
        is_drawn = distributions >= 0
        self.is_drawn[rows] = is_drawn
        self.log_q[rows[is_drawn]] = log_distribution(self.q_logits[distributions[is_drawn]]).to(
            self.log_q.dtype
        )

    def _reject(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        left = reject(
            Siblings(self.log_p[rows], None if self.log_q is None else self.log_q[rows]),
            tokens,
            self.is_drawn[rows],
        )
        has_mass = (left.log_p > -math.inf).any(dim=-1)
        self.log_p[rows] = left.log_p
        if not bool(has_mass.all()):
            self.log_p[rows[~has_mass]] = log_distribution(
                self.p_logits[self.p_rows[rows[~has_mass]]]
            )
        if self.log_q is not None and left.log_q is not None:
            self.log_q[rows] = left.log_q
        self.lost[rows] = True

    def _descend(self, rows: torch.Tensor, node: int) -> None:
        self.nodes[rows, self.accepted[rows]] = node
        places = rows.tolist()
        slots = torch.tensor([self.slots[row] for row in places], device=rows.device)
        self.p_rows[rows] += node + 1 - slots
        for row in places:
            self.slots[row] = node + 1
        self.accepted[rows] += 1
        self.tested[rows], self.lost[rows] = 0, False
