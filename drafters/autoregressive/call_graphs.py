"""CUDA graphs of whole drafting calls, for drafters that make all drafts of a round in one pass or
without keys and values.

A graph is captured for each (bucket of rows, bucket of tokens a row has to read, drafts, filters in
use). Rounds with prompts, penalties, masks, or ends chosen by confidence are drafted without.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch

from draftsmith.drafters.autoregressive.catch_up import Unread
from draftsmith.drafters.autoregressive.chain import DraftLoop
from draftsmith.drafters.autoregressive.chain_buffers import GraphShapes, bucket, for_graphs
from draftsmith.drafters.autoregressive.draft_sampler import DepthPlan, DraftSampler, DraftStep
from draftsmith.drafters.autoregressive.padded_round import (
    WIDTHS,
    PaddedRound,
    RoundInputs,
    numbers_of,
)
from draftsmith.drafters.interface import Capturable, DraftInputs
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.cuda_graphs import Capturer, row_buckets
from draftsmith.kernels.sampling.filters import Passes

MOST_LOGITS = 1 << 24  # that a graph keeps, of all its drafts: 64 MiB


class CallShape(NamedTuple):
    num_rows: int
    width: int  # tokens of a row to read
    depths: int  # drafts of a row
    passes: Passes


class CallGraphs:
    def __init__(
        self,
        drafter: CallLoop,
        pool: PagedPool | None,
        *,
        max_batch: int,
        max_blocks: int,
        capturer: Capturer,
    ):
        self.drafter, self.pool, self.max_blocks = drafter, pool, max_blocks
        self.rows = row_buckets(max_batch)
        self.shapes = GraphShapes[CallShape, list[DraftStep]](capturer, "drafting calls")
        self._inputs: RoundInputs | None = None

    def draft(self, inputs: DraftInputs, sampler: DraftSampler, most: int | None) -> bool:
        """Draft up to `most` depths into `sampler`. False, and nothing done, where they must be
        drafted without graphs."""
        unread = Unread.of(inputs, ahead=2)
        plan = sampler.plan(unread.rows, most)
        shape = self._shape_for(inputs, unread, plan, sampler)
        if shape is None:
            return False
        if self._inputs is None:
            self._inputs = RoundInputs(self.rows[-1], self.max_blocks, inputs)
        static = self._inputs
        found = self.shapes.find(shape, lambda: self._run(static, shape), idle=static.numbers)
        if found is None:
            return False
        numbers = numbers_of(unread, plan, shape.num_rows)
        (sent_numbers,), depths = plan.sent(inputs.tokens.device, numbers)
        static.fill(inputs, sent_numbers.view(-1, shape.num_rows))
        graph, drawn = found
        graph.replay()
        alive: torch.Tensor | slice = slice(len(unread.rows))
        for depth, (rows, kept, _) in enumerate(depths):
            if kept is not None:
                alive = kept if isinstance(alive, slice) else alive[kept]
            sampler.keep(rows, depth, drawn[depth].select(alive))
        return True

    def _shape_for(
        self, inputs: DraftInputs, unread: Unread, plan: DepthPlan, sampler: DraftSampler
    ) -> CallShape | None:
        """None where the round has no graph."""
        drafting = sum(budget > 0 for budget in plan.budgets)
        # A row without anything to read has no place in a graph.
        if inputs.pool is not self.pool or not plan.alive or len(plan.alive[0]) < drafting:
            return None
        if inputs.adjust is not None or inputs.least_survival > 0:
            return None
        if (longest := max(unread.counts)) > WIDTHS[-1]:
            return None
        passes, depths = for_graphs(inputs.sampling.passes), len(plan.alive)
        num_rows = bucket(self.rows, len(unread.rows))
        if not passes.all_greedy and num_rows * depths * sampler.shape[2] > MOST_LOGITS:
            return None
        return CallShape(num_rows, bucket(WIDTHS, longest), depths, passes)

    def _run(self, static: RoundInputs, shape: CallShape) -> list[DraftStep]:
        padded = PaddedRound.of(static, shape.num_rows, shape.passes)
        return self.drafter.draft_padded(padded, shape, self.pool)


class CallLoop(DraftLoop, Capturable):
    """A drafter whose drafting calls are captured whole."""

    max_depth: int | None = None  # tokens that it can draft; None: any number
    _calls: CallGraphs | None = None

    def capture(
        self, pool: PagedPool | None, *, max_batch: int, max_blocks: int, capturer: Capturer
    ) -> None:
        self._calls = CallGraphs(
            self, pool, max_batch=max_batch, max_blocks=max_blocks, capturer=capturer
        )

    def draft(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        if self._calls is None or not self._calls.draft(inputs, sampler, self.max_depth):
            self.draft_call(inputs, sampler)

    @abstractmethod
    def draft_call(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        """`draft` without graphs."""

    @abstractmethod
    def draft_padded(
        self, padded: PaddedRound, shape: CallShape, pool: PagedPool | None
    ) -> list[DraftStep]:
        """Drafts of all depths, for every row of the graph."""
