"""Draft trees from a feature head: EAGLE-2's dynamic ones, and sampled ones that have a true q.

Legend: R rows that can draft, W nodes of a level, C nodes in all, H hidden width, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.tree_laws import TreeLaws
from draftsmith.drafters.tree_nodes import TreeNodes, merged
from draftsmith.drafters.tree_reader import Level, TreeReader
from draftsmith.drafters.tree_shape import DynamicTree, SampledTree, TreeByLaw, TreeShape

if TYPE_CHECKING:
    from draftsmith.drafters.heads import CatchUp, FeatureHead


def grow(head: FeatureHead, inputs: DraftInputs, caught: CatchUp | None, shape: TreeShape) -> Proposal:
    """A tree for every row that has caught up, of `shape` but with no more than the row's `num_draft` nodes."""
    if caught is None or len(caught.rows) == 0:
        rows = torch.empty(0, dtype=torch.int64, device=inputs.num_draft.device)
        return TreeNodes(0, rows.device).proposal(inputs, rows, None, torch.empty(0, 1, dtype=torch.int64, device=rows.device))
    if isinstance(shape, TreeByLaw):
        greedy = inputs.sampling.temperature[caught.rows] == 0
        return merged(
            grow(head, inputs, caught.select(greedy), shape.greedy), grow(head, inputs, caught.select(~greedy), shape.sampled)
        )
    laws = TreeLaws(inputs, caught.rows, vocab_size=head.config.vocab_size, vocab_map=head.vocab_map)
    reader = TreeReader(head, inputs, caught)
    budgets = inputs.num_draft[caught.rows].clamp(max=shape.nodes)
    if isinstance(shape, SampledTree):
        return SampledGrowth(inputs, laws, reader, budgets).grow(shape)
    return grow_dynamic(inputs, laws, reader, budgets, shape)


def grow_dynamic(inputs: DraftInputs, laws: TreeLaws, reader: TreeReader, budgets: torch.Tensor, shape: DynamicTree) -> Proposal:
    nodes = TreeNodes(len(budgets), budgets.device)
    # A row with a small budget has few places for nodes that are read.
    widths = ((budgets + 1) // max(shape.depth - 1, 1)).clamp(1, shape.width)
    depths = budgets.clamp(max=shape.depth)
    level = reader.root
    at = torch.full_like(budgets, -1)[:, None]  # [R, W] the nodes of the level
    ranks = torch.zeros(at.shape, device=at.device)
    sound = torch.ones_like(budgets, dtype=torch.bool)
    for depth in range(shape.depth):
        alive = (ranks > -torch.inf) & (depth < depths[:, None])
        owners, columns = alive.nonzero(as_tuple=True)
        prefixes = nodes.prefixes(owners, at[owners, columns]) if laws.adjusts else []
        children = laws.likeliest(level.logits[owners, columns], owners, prefixes, shape.width)
        if depth == 0:
            sound[owners] = children.logprobs[:, 0] > -torch.inf
        tokens = torch.zeros(*at.shape, shape.width, dtype=torch.int64, device=at.device)
        worth = torch.full(tokens.shape, -torch.inf, device=at.device)
        tokens[owners, columns] = children.tokens
        worth[owners, columns] = ranks[owners, columns, None] + children.logprobs
        first = nodes.count
        nodes.add(tokens.flatten(1), at.repeat_interleave(shape.width, dim=1), worth.flatten(1))
        if depth + 1 == shape.depth:
            break
        best = worth.flatten(1).topk(min(shape.width, worth[0].numel()), dim=1)
        columns = torch.arange(best.values.shape[1], device=at.device)
        read = (columns < widths[:, None]) & (depth + 1 < depths[:, None])
        ranks = torch.where(read, best.values, -torch.inf)
        read = ranks > -torch.inf
        if not bool(read.any()):
            break
        above, at = best.indices // shape.width, best.indices + first
        states = level.next_hidden.take_along_dim(above[..., None], dim=1)
        level = reader.read(tokens.flatten(1).gather(1, best.indices), states, level.bits.gather(1, above), read, depth)
    return _dynamic_proposal(inputs, laws, nodes.best(budgets, shape.nodes), sound)


def _dynamic_proposal(inputs: DraftInputs, laws: TreeLaws, nodes: TreeNodes, sound: torch.Tensor) -> Proposal:
    q_rows = torch.full((len(sound), nodes.count + 1), -1, dtype=torch.int64, device=sound.device)
    if bool(sound.all()):
        return nodes.proposal(inputs, laws.rows, None, q_rows)
    # NaN weights: one node whose law has no mass tells the engine so.
    lost = ~sound
    nodes.tokens[lost], nodes.parents[lost, 0], nodes.ranks[lost, 0], q_rows[lost, 0] = 0, -1, 0.0, 0
    logits = torch.full((1, laws.vocab_size), -torch.inf, dtype=torch.float32, device=sound.device)
    return nodes.proposal(inputs, laws.rows, logits, q_rows)


class SampledGrowth:
    """Nodes in order of depth; a row with a smaller budget than the shape has stops earlier in that order.

    Which nodes there are follows from shape and budget alone, before anything is drawn. Cousins of one depth share the noise
    of their position; verification visits one node of a depth, so that it never sees the same noise twice.
    """

    def __init__(self, inputs: DraftInputs, laws: TreeLaws, reader: TreeReader, budgets: torch.Tensor):
        self.inputs, self.laws, self.reader, self.budgets = inputs, laws, reader, budgets
        self.nodes = TreeNodes(len(budgets), budgets.device)
        self.q_rows: list[torch.Tensor] = []  # [R, W] a level
        self.q_logits: list[torch.Tensor] = []
        self.num_laws = 0

    def grow(self, shape: SampledTree) -> Proposal:
        level, at = self.reader.root, torch.full_like(self.budgets, -1)[:, None]
        for depth, count in enumerate(shape.branches):
            first = self.nodes.count
            tokens = self._branch(level, at, depth, count)
            if depth + 1 == shape.depth:
                break
            indices = torch.arange(tokens.shape[1], device=at.device)
            # Read are the nodes whose first child is within the budget.
            read = self.nodes.count + indices * shape.branches[depth + 1] < self.budgets[:, None]
            if not bool(read.any()):
                break
            above, at = indices // count, (first + indices).expand_as(tokens)
            level = self.reader.read(tokens, level.next_hidden[:, above], level.bits[:, above], read, depth)
        self.q_rows.append(torch.full_like(self.nodes.tokens[:, first:], -1))
        q_rows = torch.cat(self.q_rows, dim=1)
        logits = torch.cat(self.q_logits) if self.num_laws > 0 else None
        return self.nodes.proposal(self.inputs, self.laws.rows, logits, q_rows)

    def _branch(self, level: Level, at: torch.Tensor, depth: int, count: int) -> torch.Tensor:
        """Gives `count` children to each of the nodes `at` [R, W] that have any; their tokens [R, W * count]."""
        first = self.nodes.count + torch.arange(at.shape[1] * count, device=at.device)
        real = first < self.budgets[:, None]
        parents = real[:, ::count]
        tokens = torch.zeros(*at.shape, count, dtype=torch.int64, device=at.device)
        told = torch.full_like(at, -1)
        greedy = self.laws.greedy[:, None] & parents
        for chosen, draws in ((greedy, False), (parents & ~greedy, True)):
            owners, columns = chosen.nonzero(as_tuple=True)
            if len(owners) == 0:
                continue
            prefixes = self.nodes.prefixes(owners, at[owners, columns]) if self.laws.adjusts else []
            logits = level.logits[owners, columns]
            if draws:
                # The newest committed token is at `first`; its successors are the children of the root.
                positions = self.reader.first[owners] + 1 + depth
                tokens[owners, columns], law = self.laws.draw(logits, owners, prefixes, positions, count)
                told[owners, columns] = self._tell(law)
            else:
                children = self.laws.likeliest(logits, owners, prefixes, count)
                tokens[owners, columns] = children.tokens
                lost = children.logprobs[:, 0] == -torch.inf
                told[owners[lost], columns[lost]] = self._lawless(int(lost.sum()))
        self.q_rows.append(told)
        self.nodes.add(tokens.flatten(1), at.repeat_interleave(count, dim=1), torch.where(real, 0.0, -torch.inf))
        return tokens.flatten(1)

    def _lawless(self, count: int) -> torch.Tensor:
        """Rows of q for laws without mass (NaN weights), which tell the engine so."""
        law = torch.full((count, self.laws.vocab_size), -torch.inf, dtype=torch.float32, device=self.budgets.device)
        return self._tell(law)

    def _tell(self, law: torch.Tensor) -> torch.Tensor:
        """The rows of q that processed laws [n, V] get."""
        self.q_logits.append(law)
        self.num_laws += len(law)
        return torch.arange(self.num_laws - len(law), self.num_laws, device=law.device)
