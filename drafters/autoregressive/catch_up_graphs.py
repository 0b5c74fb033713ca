"""CUDA graphs of a decoding round's beginning: reading the tokens committed in the round before and
drawing the first draft costs one launch.

A round commits a few tokens a row, so a graph is captured for each (bucket of rows, bucket of
tokens a row, filters in use). Prompts are read without graphs: they are long enough to keep a
device busy. R rows of the graph.
"""

from __future__ import annotations

import torch

from draftsmith.drafters.autoregressive.catch_up import Unread
from draftsmith.drafters.autoregressive.chain_buffers import ChainBuffers, bucket
from draftsmith.drafters.autoregressive.draft_sampler import DepthPlan, DraftStep, RowsAtDepth
from draftsmith.drafters.autoregressive.graph_shapes import GraphShapes
from draftsmith.drafters.autoregressive.padded_round import (
    WIDTHS,
    PaddedRound,
    RoundInputs,
    numbers_of,
)
from draftsmith.drafters.autoregressive.state import ChainState, HeadStep, ReadsCommitted
from draftsmith.drafters.interface import DraftInputs
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.cuda_graphs import Capturer
from draftsmith.kernels.sampling.filters import Passes


class CatchUpGraphs:
    def __init__(
        self,
        drafter: ReadsCommitted,
        pool: PagedPool,
        rows: list[int],
        max_blocks: int,
        capturer: Capturer,
    ):
        self.drafter, self.pool, self.rows, self.max_blocks = drafter, pool, rows, max_blocks
        self.shapes = GraphShapes[tuple[int, int, Passes], DraftStep](
            capturer, "readings of committed tokens"
        )
        self._inputs: RoundInputs | None = None

    def run(
        self,
        buffers: ChainBuffers,
        inputs: DraftInputs,
        unread: Unread,
        plan: DepthPlan,
        passes: Passes,
    ) -> tuple[DraftStep, list[RowsAtDepth]] | None:
        """The first drafts of all rows of `unread`, whose state is in `buffers` then, and the plan
        on the device. None, and nothing done, where the round must be read without graphs."""
        if max(unread.counts) > WIDTHS[-1]:
            return None
        num_rows, width = bucket(self.rows, len(unread.rows)), bucket(WIDTHS, max(unread.counts))
        if self._inputs is None:
            self._inputs = RoundInputs(self.rows[-1], self.max_blocks, inputs)
        static = self._inputs
        # Without a row that has tokens to read it writes the null block alone.
        found = self.shapes.find(
            (num_rows, width, passes),
            lambda: self._read(static, buffers, num_rows, width, passes),
            idle=static.numbers,
        )
        if found is None:
            return None
        (numbers,), depths = plan.sent(inputs.tokens.device, numbers_of(unread, plan, num_rows))
        static.fill(inputs, numbers.view(-1, num_rows))
        graph, drawn = found
        graph.replay()
        return drawn, depths

    def _read(
        self,
        static: RoundInputs,
        buffers: ChainBuffers,
        num_rows: int,
        width: int,
        passes: Passes,
    ) -> DraftStep:
        padded = PaddedRound.of(static, num_rows, passes)
        slots = padded.slots(width)
        positions, taps = padded.starts[:, None] + slots, padded.taps(slots)
        lengths = torch.full_like(padded.counts, width)
        context = PagedPass(self.pool, padded.tables, positions.flatten(), lengths)
        step = self.drafter.read_committed(
            padded.tokens(slots).flatten(),
            None if taps is None else taps.flatten(0, 1),
            positions.flatten(),
            context,
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
