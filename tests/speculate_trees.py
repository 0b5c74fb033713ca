"""Lossless decoding of a batch of prompts with draft trees, without a server: `speculate.py` with
another proposal and another verification.

The keys and values of a kept path lie where its nodes were, so the next pass reads the path again
as known tokens. Legend: B rows, N nodes, T ragged positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import DraftInputs, GrowsTrees, Proposal, ServingDrafter
from draftsmith.drafters.speculate import SpeculatedBatch, SpeculatedRow, SpeculationBatch, rows_of
from draftsmith.drafters.target.target import Target, TargetOutput
from draftsmith.drafters.tree_shape import TreeShape
from draftsmith.drafters.trees.nodes import node_depths, tried
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import TreeLayout
from draftsmith.kernels.dispatch import sent
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import DraftTree


class TreeSpan(NamedTuple):
    """Tokens of a row in a pass."""

    begin: int  # position of the first known token
    num_known: int
    parents: Sequence[int]  # of the nodes; -1: the last known token


class TreePass(NamedTuple):
    """Positions and attention layout of a pass with trees."""

    positions: list[int]
    layout: TreeLayout


def tree_pass(spans: Sequence[TreeSpan], device: torch.device) -> TreePass:
    """Positions, cache indices and ancestors of all tokens of a pass."""
    positions: list[int] = []
    kv_indices: list[int] = []
    ancestors: list[int] = []
    first: list[int] = []
    for begin, num_known, parents in spans:
        end = begin + num_known
        bits: list[int] = []
        for node, parent in enumerate(parents):
            bits.append((1 if parent < 0 else bits[parent]) | 1 << (node + 1))
        positions += range(begin, end)
        positions += (end + depth for depth in node_depths(parents))
        kv_indices += range(begin, end + len(parents))
        ancestors += [-1] * num_known + bits
        first += [end - 1] * (num_known + len(parents))
    return TreePass(positions, TreeLayout(*sent(device, kv_indices, ancestors, first)))


@torch.no_grad()
def speculate_trees(
    drafter: ServingDrafter,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    shape: TreeShape,
    temperature: float,
    seeds: Sequence[int],
    max_new_tokens: int,
) -> SpeculatedBatch:
    """As `speculate`, with trees of `shape`. A round's drafted tokens are the kept path and the
    first child that was tested behind it. Raises `UserError` for a target with recurrent layers."""
    batch = _TreeBatch(drafter, target, rows_of(prompts, seeds), shape, temperature, max_new_tokens)
    return batch.decode()


class _TreeBatch(SpeculationBatch):
    def __init__(
        self,
        drafter: ServingDrafter,
        target: Target,
        rows: list[SpeculatedRow],
        shape: TreeShape,
        temperature: float,
        max_new_tokens: int,
    ):
        super().__init__(
            drafter, target, rows, shape.nodes, temperature, max_new_tokens, spare=shape.nodes
        )
        if self.states is not None:
            raise UserError(
                f"{target.name!r} has layers with a recurrent state, which reads one continuation "
                "only; leave trees out"
            )
        self.shape = shape
        # Positions of each row whose keys and values are right.
        self.computed = [max(row.num_prompt - 1, 0) for row in rows]

    def draft(self, inputs: DraftInputs) -> Proposal:
        assert isinstance(self.drafter, GrowsTrees)
        return self.drafter.propose_tree(inputs, self.shape)

    def run_round(self, rows: list[SpeculatedRow]) -> None:
        proposal = self.propose(rows)
        lengths = proposal.lengths.tolist()
        nodes = [row[:length] for row, length in zip(proposal.tokens.tolist(), lengths)]
        parents: list[list[int]] = [[] for _ in rows]
        if proposal.parents is not None:
            parents = [row[:length] for row, length in zip(proposal.parents.tolist(), lengths)]
        spans = [
            TreeSpan(self.computed[row.index], len(row.tokens) - self.computed[row.index], one)
            for row, one in zip(rows, parents)
        ]
        output = self.forward_trees(rows, spans, nodes)
        paths, emitted = self.verify_trees(rows, proposal, output)
        begin = 0
        for row, span, tokens, path, new in zip(rows, spans, nodes, paths, emitted):
            if output.taps is not None:
                # Those of known tokens but the last were kept when the tokens were nodes.
                last = begin + span.num_known - 1
                taps = output.taps[[last, *(last + 1 + node for node in path)]]
                row.taps = taps if row.taps is None else torch.cat([row.taps, taps])
            begin += span.num_known + len(span.parents)
            self.computed[row.index] = len(row.tokens)
            self.commit(row, [tokens[node] for node in tried(span.parents, path)], len(path), new)

    def forward_trees(
        self, rows: list[SpeculatedRow], spans: list[TreeSpan], nodes: list[list[int]]
    ) -> TargetOutput:
        """Target pass over each row's known tokens and nodes. Logits are those of the last known
        token and of the nodes."""
        positions, layout = tree_pass(spans, self.device)
        lengths = [span.num_known + len(span.parents) for span in spans]
        context = PagedPass(
            self.target_pool,
            self.tables(rows),
            self.tensor(positions),
            self.tensor(lengths),
            tree=layout,
        )
        ids: list[int] = []
        chosen: list[int] = []
        for row, span, tokens in zip(rows, spans, nodes):
            ids += row.tokens[span.begin :] + tokens
            chosen += range(len(ids) - len(tokens) - 1, len(ids))
        return self.target.forward(
            self.tensor(ids)[None],
            self.tensor(positions)[None],
            context,
            self.tensor(chosen),
            self.drafter.taps,
        )

    def verify_trees(
        self, rows: list[SpeculatedRow], proposal: Proposal, output: TargetOutput
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Kept nodes of each row, and the tokens that it gets."""
        sampling = SamplingRows.of([self.temperature] * len(output.logits), device=self.device)
        parents = proposal.parents
        if parents is None:  # nothing was drafted
            parents = torch.empty_like(proposal.tokens)
        verdict = verify_tree(
            process(output.logits, sampling),
            DraftTree(proposal.tokens, parents, proposal.lengths),
            proposal.logits,
            None if proposal.logits is None else proposal.q_rows,
            self.tensor([row.seed for row in rows]),
            self.starts(rows),
        )
        accepted = verdict.accepted.tolist()
        kept = zip(verdict.nodes.tolist(), verdict.tokens.tolist(), accepted)
        paths, emitted = zip(*((nodes[:size], new[: size + 1]) for nodes, new, size in kept))
        return list(paths), list(emitted)
