"""Draft trees from a feature head: EAGLE-2's dynamic ones, and sampled ones that have a true q.

How many nodes a level has is known beforehand, from the shape and the budgets; which of them are
alive is not, and stays on the device: nothing is read back from it. Legend: R rows that can draft,
W nodes of a level, C nodes in all, H hidden width, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.autoregressive.chain import ChainLoop, DraftPrefill, read_unread
from draftsmith.drafters.autoregressive.draft_sampler import DepthPlan
from draftsmith.drafters.autoregressive.state import Unread
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.tree_shape import (
    DynamicTree,
    FixedTree,
    GrownShape,
    SampledShape,
    SampledTree,
    TreeShape,
)
from draftsmith.drafters.trees.candidates import Parents, TreeDistributions
from draftsmith.drafters.trees.level_graphs import (
    LevelGraphs,
    LevelInputs,
    read_level,
    spare_blocks,
)
from draftsmith.drafters.trees.nodes import TreeNodes, merged, no_trees
from draftsmith.kernels.attention.pool import PagedPool, TreeLayout
from draftsmith.kernels.constants import MAX_NODES, NULL_BLOCK
from draftsmith.kernels.cuda_graphs import GraphRoom
from draftsmith.kernels.dispatch import sent


class TreeLoop(ChainLoop):
    """A chain drafter that also reads all nodes of a tree's level in one pass."""

    level_graphs: LevelGraphs | None = None

    def capture(self, room: GraphRoom) -> None:
        super().capture(room)
        self.level_graphs = LevelGraphs(self, room)

    @torch.no_grad()
    def propose_tree(self, inputs: DraftInputs, shape: TreeShape) -> Proposal:
        assert not isinstance(shape, FixedTree)
        self.refresh()
        greedy: Sequence[bool] | None = inputs.sampling.greedy_rows
        passes = inputs.sampling.passes
        if greedy is None and (passes.all_greedy or not passes.greedy):
            greedy = [passes.all_greedy] * len(inputs.num_draft)
        if greedy is None:
            # Rows chosen on the device: a look at it, while it has nothing else to do.
            greedy = (inputs.sampling.temperature == 0).tolist()
        unread = Unread.of(inputs, self.ahead)
        if not unread.rows:
            return no_trees(inputs)
        plan = DepthPlan.of(inputs.num_draft.tolist(), unread.rows, most=1)
        prefill, depths = read_unread(self, inputs, unread, plan)
        return grow(self, inputs, prefill, shape, greedy) if depths else no_trees(inputs)


class Growth(NamedTuple):
    """Collaborators and budgets of trees of one kind."""

    inputs: DraftInputs
    distributions: TreeDistributions
    reader: TreeReader
    budgets: torch.Tensor  # [R] most nodes of each row, at least 1
    most: int  # the largest budget


def grow(
    head: TreeLoop,
    inputs: DraftInputs,
    prefill: DraftPrefill,
    shape: GrownShape,
    greedy: Sequence[bool],
) -> Proposal:
    """Grow a tree for every prefilled row, of `shape` but with no more than the row's `num_draft`
    nodes. `greedy` marks the greedy rows of the batch."""
    if isinstance(shape, SampledShape):
        grown = [
            _grow_rows(
                head,
                inputs,
                prefill,
                shape.greedy if kind else shape.sampled,
                [one == kind for one in greedy],
            )
            for kind in sorted({*greedy})
        ]
        return grown[0] if len(grown) == 1 else merged(*grown)
    return _grow_rows(head, inputs, prefill, shape, [True] * len(greedy))


def _grow_rows(
    head: TreeLoop,
    inputs: DraftInputs,
    prefill: DraftPrefill,
    shape: DynamicTree | SampledTree,
    wanted: list[bool],
) -> Proposal:
    indices = prefill.indices
    chosen = [at for at, row in enumerate(indices) if wanted[row]]
    if not chosen:
        return no_trees(inputs)
    if len(chosen) < len(indices):
        (picked,) = sent(inputs.tokens.device, chosen)
        prefill = prefill.select(picked, [indices[at] for at in chosen])
    limits, budgets = prefill.budgets.clamp(max=shape.nodes), inputs.num_draft[prefill.indices]
    distributions = TreeDistributions(
        inputs, prefill.rows, vocab_size=head.vocab_size, vocab_map=head.vocab_map
    )
    reader, most = TreeReader(head, inputs, prefill, limits), min(int(budgets.max()), shape.nodes)
    growth = Growth(inputs, distributions, reader, limits, most)
    return (
        SampledGrowth(growth).grow(shape)
        if isinstance(shape, SampledTree)
        else grow_dynamic(growth, shape)
    )


def grow_dynamic(growth: Growth, shape: DynamicTree) -> Proposal:
    inputs, distributions, reader, budgets, most = growth
    nodes = TreeNodes(len(budgets), budgets.device)
    # A row with a small budget has few places for nodes that are read.
    deepest, readable = min(shape.depth, most), max(shape.depth - 1, 1)
    widest = min(max((most + 1) // readable, 1), shape.width)
    widths = ((budgets + 1) // readable).clamp(1, shape.width)
    depths = budgets.clamp(max=shape.depth)
    level = reader.root
    at = torch.full_like(budgets, -1)[:, None]  # [R, W] the nodes of the level
    ranks = torch.zeros(at.shape, device=at.device)
    has_mass = torch.ones_like(budgets, dtype=torch.bool)
    for depth in range(deepest):
        children = distributions.likeliest(
            Parents(level.logits, nodes, at, ranks > -torch.inf, depth), shape.width
        )
        if depth == 0:
            has_mass = children.logprobs[:, 0, 0] > -torch.inf
        worth = (ranks[..., None] + children.logprobs).flatten(1)
        tokens, first = children.tokens.flatten(1), nodes.count
        nodes.add(tokens, at.repeat_interleave(shape.width, dim=1), worth)
        if depth + 1 == deepest:
            break
        best = worth.topk(min(widest, worth.shape[1]), dim=1)
        read = (torch.arange(best.values.shape[1], device=at.device) < widths[:, None]) & (
            depth + 1 < depths[:, None]
        )
        ranks = torch.where(read, best.values, -torch.inf)
        above, at = best.indices // shape.width, best.indices + first
        states = level.next_hidden.take_along_dim(above[..., None], dim=1)
        bits = level.bits.gather(1, above)
        level = reader.read(tokens.gather(1, best.indices), states, bits, ranks > -torch.inf, depth)
    kept = nodes.best(budgets, min(shape.nodes, most))
    q_rows = torch.full(
        (len(has_mass), kept.count + 1), -1, dtype=torch.int64, device=has_mass.device
    )
    return kept.proposal(inputs, distributions.rows, None, q_rows, has_mass)


class SampledGrowth:
    """Nodes in order of depth; a row with a smaller budget than the shape has stops earlier in that
    order.

    Which nodes there are follows from shape and budget alone, before anything is drawn. Cousins of
    one depth share the noise of their position; verification visits one node of a depth, so that it
    never sees the same noise twice.
    """

    def __init__(self, growth: Growth):
        self.growth = growth
        self.nodes = TreeNodes(len(growth.budgets), growth.budgets.device)
        self.has_mass = torch.ones_like(growth.budgets, dtype=torch.bool)
        self.q_rows: list[torch.Tensor] = []  # [R, W] a level
        self.q_logits: list[torch.Tensor] = []
        self.num_distributions = 0

    def grow(self, shape: SampledTree) -> Proposal:
        inputs, distributions, reader, budgets, most = self.growth
        level, at = reader.root, torch.full_like(budgets, -1)[:, None]
        for depth, count in enumerate(shape.branches):
            first = self.nodes.count
            tokens = self._branch(level, at, depth, count)
            # Read are the nodes whose first child is within the budget: the first ones of a level.
            num_read = 0
            if depth + 1 < shape.depth:
                num_read = min(
                    tokens.shape[1], -(-(most - self.nodes.count) // shape.branches[depth + 1])
                )
            if num_read <= 0:
                break
            indices = torch.arange(num_read, device=at.device)
            read = self.nodes.count + indices * shape.branches[depth + 1] < budgets[:, None]
            above, at = indices // count, (first + indices).expand(len(budgets), -1)
            level = reader.read(
                tokens[:, :num_read], level.next_hidden[:, above], level.bits[:, above], read, depth
            )
        rows_of_q = torch.cat(self.q_rows, dim=1)
        q_rows = torch.nn.functional.pad(
            rows_of_q, (0, self.nodes.count + 1 - rows_of_q.shape[1]), value=-1
        )
        logits = torch.cat(self.q_logits) if self.q_logits else None
        return self.nodes.proposal(inputs, distributions.rows, logits, q_rows, self.has_mass)

    def _branch(self, level: GrownLevel, at: torch.Tensor, depth: int, count: int) -> torch.Tensor:
        """Gives `count` children to each of the nodes `at` [R, W] that have any; their tokens [R, W
        * count]."""
        distributions, budgets = self.growth.distributions, self.growth.budgets
        first = self.nodes.count + torch.arange(at.shape[1] * count, device=at.device)
        real = first < budgets[:, None]
        alive, greedy = real[:, ::count], distributions.greedy[:, None]
        parents, passes = (
            Parents(level.logits, self.nodes, at, alive, depth),
            distributions.sampling.passes,
        )
        tokens, rows_of_q = (
            torch.zeros(*at.shape, count, dtype=torch.int64, device=at.device),
            torch.full_like(at, -1),
        )
        if not passes.all_greedy:
            # The newest committed token is at `first`; its successors are the children of the root.
            tokens, distribution = distributions.draw(
                parents, self.growth.reader.first + 1 + depth, count
            )
            rows_of_q = torch.where(
                alive & ~greedy, self._q_rows_of(distribution).view(at.shape), -1
            )
        if passes.greedy:
            children = distributions.likeliest(parents, count)
            tokens = torch.where(greedy[..., None], children.tokens, tokens)
            self.has_mass &= ~(alive & greedy & (children.logprobs[..., 0] == -torch.inf)).any(
                dim=1
            )
        self.q_rows.append(rows_of_q)
        self.nodes.add(
            tokens.flatten(1),
            at.repeat_interleave(count, dim=1),
            torch.where(real, 0.0, -torch.inf),
        )
        return tokens.flatten(1)

    def _q_rows_of(self, distribution: torch.Tensor) -> torch.Tensor:
        """Append processed distributions [n, V] to q; their rows."""
        self.q_logits.append(distribution)
        self.num_distributions += len(distribution)
        return torch.arange(
            self.num_distributions - len(distribution),
            self.num_distributions,
            device=distribution.device,
        )


class GrownLevel(NamedTuple):
    """Head outputs at the nodes of one level, W nodes for each of R rows. Arbitrary where a node is
    not alive."""

    next_hidden: torch.Tensor  # [R, W, H]
    logits: torch.Tensor  # [R, W, Vd] raw
    bits: torch.Tensor  # [R, W] int64, which read nodes a node sees, itself included


class TreeReader:
    """Reader of a tree's nodes. The i-th node read of a row keeps its keys at kv index n + i, n
    being that of the row's newest committed token, which has no state.

    The engine has reserved an index for every token it may be offered there; what is left behind is
    overwritten by true states. A level is read whole: nodes that are not alive come last in it and
    take the indices after the others, where the next level writes over them or, beyond what is
    reserved, the null block has them.
    """

    def __init__(
        self, head: TreeLoop, inputs: DraftInputs, prefill: DraftPrefill, budgets: torch.Tensor
    ):
        assert inputs.pool is not None
        self.head, self.pool = head, inputs.pool
        self.first = prefill.positions + 1
        self.tables = reserved(prefill.tables, self.first + budgets, self.pool)
        self.used = torch.zeros_like(self.first)
        step = prefill.step
        self.root = GrownLevel(
            step.next_hidden[:, None],
            head.draft_logits(step.head_input)[:, None],
            torch.zeros_like(self.first)[:, None],
        )

    def read(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        bits: torch.Tensor,
        alive: torch.Tensor,
        depth: int,
    ) -> GrownLevel:
        """tokens [R, W] at `depth` below the root (0: its children); states [R, W, H] and bits [R,
        W] of the nodes above.

        `alive` [R, W]: in each row, all before the first that is not.
        """
        index = self.used[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        bits = torch.where(alive, bits | (1 << index.clamp(max=MAX_NODES)), 0)
        self.used = self.used + alive.sum(dim=1)
        first = self.first[:, None].expand_as(tokens)
        # A node that is not alive may come from a state of NaN, which the null block must not get.
        states = torch.where(alive[..., None], hidden, 0.0)
        inputs = LevelInputs(
            tokens, states, first + depth, TreeLayout(first + index, bits, first), self.tables
        )
        graphs = self.head.level_graphs
        output = None if graphs is None else graphs.read(inputs, self.pool)
        if output is None:
            output = read_level(self.head, self.pool, inputs)
        hidden, logits = (part.unflatten(0, tokens.shape) for part in output)
        return GrownLevel(hidden, logits, bits)


def reserved(tables: torch.Tensor, last: torch.Tensor, pool: PagedPool) -> torch.Tensor:
    """Block tables [R, n] with the null block for all kv indices after `last` [R], and enough of it
    for a whole level more."""
    tables = torch.nn.functional.pad(tables, (0, spare_blocks(pool)), value=NULL_BLOCK)
    begins = torch.arange(tables.shape[1], device=tables.device) * pool.block_size
    return torch.where(begins <= last[:, None], tables, NULL_BLOCK)
