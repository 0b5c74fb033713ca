"""CUDA graphs of the steps of a chain: reading a drafted token and drawing the next one costs one
launch.

A graph is captured once for each (bucket of rows, filters in use), serves every k, and stays valid
across swaps: weights, pool and its own buffers never move. The buffers are those of all buckets and
hold the state from step to step, so that nothing is copied between the steps of a round, and
nothing read back. Rows that drafted all they may, and surplus rows of a bucket, read and write the
null block.

R rows that draft, H hidden width, Vd draft vocabulary.

A decoding round's beginning has graphs too: reading the tokens committed in the round before and
drawing the first draft, for each (bucket of rows, bucket of tokens a row, filters in use). Prompts
are read without graphs: they are long enough to keep a device busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftsmith.drafters.autoregressive.catch_up import Unread
from draftsmith.drafters.autoregressive.chain_buffers import ChainBuffers, bucket, for_graphs
from draftsmith.drafters.autoregressive.draft_sampler import (
    DepthPlan,
    DraftSampler,
    DraftStep,
    RowsAtDepth,
    draw_tokens,
)
from draftsmith.drafters.autoregressive.padded_round import PaddedRound, RoundGraphs, RoundShape
from draftsmith.drafters.autoregressive.state import ChainState, HeadStep, ReadsCommitted
from draftsmith.drafters.interface import DraftInputs
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.cuda_graphs import Graph, GraphRoom, GraphShapes
from draftsmith.kernels.sampling.filters import Passes


class ChainGraphs:
    def __init__(self, drafter: ReadsCommitted, room: GraphRoom):
        assert room.pool is not None
        self.drafter, self.pool, self.max_blocks = drafter, room.pool, room.max_blocks
        self.steps = GraphShapes[tuple[int, Passes], DraftStep](room.capturer, "draft steps")
        self.beginnings = RoundGraphs("readings of committed tokens", self._read, room)
        self.rows = self.beginnings.rows
        self._buffers: ChainBuffers | None = None

    def draft_round(
        self, inputs: DraftInputs, unread: Unread, plan: DepthPlan, sampler: DraftSampler
    ) -> bool:
        """Read what a decoding round has to read and draft all depths, into `sampler`. False, and
        nothing done, where it must be read without graphs."""
        count, goes_on = len(unread.rows), len(plan.alive) > 1
        if not plan.alive or self._buffers is None:
            return False
        shape = self.beginnings.shape_of(inputs, unread, depths=1)
        steps = None if shape is None or not goes_on else self._steps(count, shape.passes)
        if shape is None or (goes_on and steps is None):
            return False
        found = self.beginnings.replay(shape, inputs, unread, plan)
        if found is None:
            return False
        first, depths = found
        sampler.keep_depths(depths, lambda at: first if at == 0 else replayed(steps), count)
        return True

    def draft(
        self,
        state: ChainState,
        budgets: torch.Tensor,
        inputs: DraftInputs,
        sampler: DraftSampler,
        depths: Sequence[RowsAtDepth],
    ) -> bool:
        """Draft the depths after the first from `state` on, into `sampler`; `budgets` [R] are of
        its rows. False where they must be drafted without graphs."""
        if not depths or inputs.pool is not self.pool:
            return not depths
        (rows, kept, _), passes = depths[0], for_graphs(inputs.sampling.passes)
        if kept is not None:
            state, budgets = state.select(kept), budgets[kept]
        if self._buffers is None:
            self._buffers = ChainBuffers(
                self.rows[-1], self.max_blocks, state.hidden, inputs.sampling
            )
        if (steps := self._steps(len(rows), passes)) is None:
            return False
        self._buffers.fill(state, budgets - 1, inputs.seeds[rows], inputs.sampling.select(rows))
        chosen = [depths[0]._replace(kept=None), *depths[1:]]
        sampler.keep_depths(chosen, lambda at: replayed(steps), len(rows), first=1)
        return True

    def _steps(self, count: int, passes: Passes) -> tuple[Graph, DraftStep] | None:
        """The graph of a step of `count` rows."""
        buffers, num_rows = self._buffers, bucket(self.rows, count)
        assert buffers is not None
        # Without a row that may draft a step writes the null block alone.
        return self.steps.find(
            (num_rows, passes),
            lambda: self._step(buffers, num_rows, passes),
            before=buffers.left.zero_,
        )

    def _step(self, buffers: ChainBuffers, num_rows: int, passes: Passes) -> DraftStep:
        first = slice(num_rows)
        alive = buffers.left[first] > 0
        positions = torch.where(alive, buffers.positions[first] + 1, 0)
        tables = torch.where(alive[:, None], buffers.tables[first], NULL_BLOCK)
        # What a row that is done has left behind may be NaN, which the null block must not get.
        hidden = torch.where(alive[:, None], buffers.hidden[first], 0.0)
        context = PagedPass(self.pool, tables, positions, torch.ones_like(positions))
        step = self.drafter.read_drafts(buffers.tokens[first], hidden, context)
        logits = self.drafter.draft_logits(step.head_input)
        sampling = replace(buffers.sampling.select(first), passes=passes)
        places = positions + self.drafter.ahead
        drawn = draw_tokens(logits, sampling, buffers.seeds[first], places, self.drafter.vocab_map)
        buffers.tokens[first].copy_(drawn.tokens)
        buffers.hidden[first].copy_(step.next_hidden)
        buffers.positions[first].add_(1)
        buffers.left[first].sub_(1)
        return drawn

    def _read(self, padded: PaddedRound, shape: RoundShape) -> DraftStep:
        """The first drafts of all rows, whose state is in the buffers then."""
        width, buffers = shape.width, self._buffers
        assert buffers is not None
        slots = padded.slots(width)
        positions, taps = padded.starts[:, None] + slots, padded.taps(slots)
        lengths = torch.full_like(padded.counts, width)
        context = PagedPass(self.pool, padded.tables, positions.flatten(), lengths)
        step = self.drafter.read_committed(
            padded.tokens(slots).flatten(), None if taps is None else taps.flatten(0, 1), context
        )
        step = HeadStep(*(part[width - 1 :: width] for part in step))
        newest = positions[:, -1]
        drawn = padded.draw(
            self.drafter.draft_logits(step.head_input),
            newest + self.drafter.ahead,
            self.drafter.vocab_map,
        )
        state = ChainState(drawn.tokens, step.next_hidden, newest, padded.tables)
        buffers.write(state, padded.budgets - 1, padded.seeds, padded.sampling)
        return drawn


def replayed(steps: tuple[Graph, DraftStep] | None) -> DraftStep:
    """The next drafts."""
    assert steps is not None
    graph, drawn = steps
    graph.replay()
    return drawn
