"""CUDA graphs of a decoding round's beginning: reading the tokens committed in the round before and
drawing the first draft costs one launch.

A round commits a few tokens a row, so a graph is captured for each (bucket of rows, bucket of
tokens a row, filters in use). A row with fewer tokens reads its last one again, at the same place;
surplus rows read and write the null block. Prompts are read without graphs: they are long enough to
keep a device busy. R rows of the graph, W tokens of each, B rows of the batch.
"""

from __future__ import annotations

import itertools

import torch

from draftsmith.drafters.autoregressive.catch_up import Unread
from draftsmith.drafters.autoregressive.chain_buffers import ChainBuffers, bucket
from draftsmith.drafters.autoregressive.draft_sampler import (
    DepthPlan,
    DraftStep,
    RowsAtDepth,
    draw_tokens,
)
from draftsmith.drafters.autoregressive.graph_shapes import GraphShapes
from draftsmith.drafters.autoregressive.state import ChainState, HeadStep, ReadsCommitted
from draftsmith.drafters.interface import DraftInputs
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.cuda_graphs import Capturer
from draftsmith.kernels.sampling.filters import Passes, SamplingRows

WIDTHS = (2, 4, 8, 16)  # tokens of a row


class RoundInputs:
    """Inputs of a round of as many rows as a batch may have, at fixed addresses."""

    def __init__(self, num_rows: int, max_blocks: int, like: DraftInputs):
        most = num_rows * (WIDTHS[-1] + 1)  # the newest token may have no state yet
        whole = {"dtype": torch.int64, "device": like.tokens.device}
        # What the host says of each row of the graph, in the order of `numbers_of`.
        self.numbers = torch.zeros(6, num_rows, **whole)
        self.tokens = torch.zeros(most, **whole)
        self.taps = None if like.taps is None else like.taps.new_zeros(most, like.taps.shape[1])
        self.tables = torch.full((num_rows, max_blocks), NULL_BLOCK, **whole)
        self.seeds = torch.zeros(num_rows, **whole)
        sampling = like.sampling
        self.sampling = [
            part.new_zeros(num_rows)
            for part in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        ]

    def fill(self, inputs: DraftInputs, numbers: torch.Tensor) -> None:
        """`numbers` [6, R]."""
        self.numbers[:, : numbers.shape[1]].copy_(numbers)
        self.tokens[: len(inputs.tokens)].copy_(inputs.tokens)
        if self.taps is not None and inputs.taps is not None:
            self.taps[: len(inputs.taps)].copy_(inputs.taps)
        count, width = inputs.block_tables.shape
        if width < self.tables.shape[1]:
            self.tables[:, width:] = NULL_BLOCK
        self.tables[:count, :width].copy_(inputs.block_tables)
        self.seeds[:count].copy_(inputs.seeds)
        sampling = inputs.sampling
        if not sampling.passes.all_greedy:
            parts = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
            for buffer, values in zip(self.sampling, parts):
                buffer[:count].copy_(values)


def numbers_of(unread: Unread, plan: DepthPlan, num_rows: int) -> list[int]:
    """[6 * num_rows]: row of the batch, tokens to read, position of the first, where it and its
    taps are, tokens to draft. Zeros for surplus rows."""
    ends = list(itertools.accumulate(unread.counts))
    taps = [end - count for end, count in zip(ends, unread.counts)]
    columns = (*unread, taps, plan.budgets_of(unread.rows))
    padding = [0] * (num_rows - len(unread.rows))
    return [number for column in columns for number in (*column, *padding)]


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
        which, counts, starts, begins, taps_at, budgets = static.numbers[:, :num_rows]
        real = counts > 0
        last = (counts - 1).clamp(min=0)
        slots = torch.arange(width, device=which.device).minimum(last[:, None])  # [R, W]
        tables = torch.where(real[:, None], static.tables[which], NULL_BLOCK)
        positions = starts[:, None] + slots
        taps = None
        if static.taps is not None:
            # A surplus row would read those of another, which may be NaN.
            taps = static.taps[(taps_at[:, None] + slots).flatten()]
            taps = torch.where(real[:, None].expand_as(slots).reshape(-1, 1), taps, 0.0)
        lengths = torch.full_like(counts, width)
        context = PagedPass(self.pool, tables, positions.flatten(), lengths)
        ids = static.tokens[(begins[:, None] + slots).flatten()]
        step = self.drafter.read_committed(ids, taps, positions.flatten(), context)
        step = HeadStep(*(part[width - 1 :: width] for part in step))
        sampling = SamplingRows(*(part[which] for part in static.sampling), passes=passes)
        newest, seeds = positions[:, -1], static.seeds[which]
        drawn = draw_tokens(
            self.drafter.draft_logits(step.head_input),
            sampling,
            seeds,
            newest + self.drafter.ahead,
            self.drafter.vocab_map,
        )
        buffers.write(
            ChainState(drawn.tokens, step.next_hidden, newest, tables), budgets - 1, seeds, sampling
        )
        return drawn
