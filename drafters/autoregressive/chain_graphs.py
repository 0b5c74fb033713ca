"""CUDA graphs of the steps of a chain: reading a drafted token and drawing the next one costs one
launch.

A graph is captured once for each (bucket of rows, filters in use), serves every k, and stays valid
across swaps: weights, pool and its own buffers never move. The buffers are those of all buckets and
hold the state from step to step, so that nothing is copied between the steps of a round, and
nothing read back. Rows that drafted all they may, and surplus rows of a bucket, read and write the
null block.

R rows that draft, H hidden width, Vd draft vocabulary.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from draftsmith.drafters.autoregressive.draft_sampler import (
    DraftSampler,
    DraftStep,
    RowsAtDepth,
    draw_tokens,
)
from draftsmith.drafters.interface import DraftInputs
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.cuda_graphs import Capturer, Graph, row_buckets
from draftsmith.kernels.sampling.filters import Passes, SamplingRows

if TYPE_CHECKING:
    from draftsmith.drafters.autoregressive.state import ChainState, ReadsOwnDrafts

log = logging.getLogger(__name__)


class ChainBuffers:
    """State of as many rows as a batch may have, at fixed addresses. A bucket uses the first of
    them."""

    def __init__(self, num_rows: int, max_blocks: int, hidden: torch.Tensor):
        device = hidden.device
        whole = {"dtype": torch.int64, "device": device}
        self.tokens, self.positions, self.left, self.seeds = torch.zeros(4, num_rows, **whole)
        self.tables = torch.full((num_rows, max_blocks), NULL_BLOCK, **whole)
        self.hidden = torch.zeros(num_rows, hidden.shape[1], dtype=hidden.dtype, device=device)
        self.temperature, self.min_p = torch.zeros(2, num_rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(num_rows, dtype=torch.float64, device=device)
        self.top_k = torch.zeros(num_rows, **whole)

    def fill(
        self, state: ChainState, left: torch.Tensor, seeds: torch.Tensor, sampling: SamplingRows
    ) -> None:
        """`left` [R]: how many tokens each row may still draft."""
        count, width = state.tables.shape
        self.left.zero_()
        self.tables[:count, width:] = NULL_BLOCK
        self.tables[:count, :width].copy_(state.tables)
        pairs = [
            (self.tokens, state.tokens),
            (self.hidden, state.hidden),
            (self.positions, state.positions),
            (self.left, left),
        ]
        pairs += [
            (self.seeds, seeds),
            (self.temperature, sampling.temperature),
            (self.min_p, sampling.min_p),
        ]
        pairs += [(self.top_p, sampling.top_p), (self.top_k, sampling.top_k)]
        for buffer, values in pairs:
            buffer[:count].copy_(values)


class ChainGraphs:
    def __init__(
        self,
        drafter: ReadsOwnDrafts,
        pool: PagedPool,
        *,
        max_batch: int,
        max_blocks: int,
        capturer: Capturer,
    ):
        self.drafter, self.pool, self.max_blocks, self.capturer = (
            drafter,
            pool,
            max_blocks,
            capturer,
        )
        self.rows = row_buckets(max_batch)
        self._buffers: ChainBuffers | None = None
        self._graphs: dict[tuple[int, Passes], tuple[Graph, DraftStep]] = {}
        self.broken = False

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def draft(
        self,
        state: ChainState,
        inputs: DraftInputs,
        sampler: DraftSampler,
        depths: Sequence[RowsAtDepth],
    ) -> bool:
        """Draft the depths after the first from `state` on, into `sampler`. False where they must
        be drafted without graphs."""
        if not depths or self.broken or inputs.pool is not self.pool:
            return not depths
        if depths[0].kept is not None:
            state = state.select(depths[0].kept)
        rows, passes = depths[0].rows, for_graphs(inputs.sampling.passes)
        if self._buffers is None:
            self._buffers = ChainBuffers(self.rows[-1], self.max_blocks, state.hidden)
        key = (self.rows[bisect.bisect_left(self.rows, len(rows))], passes)
        if key not in self._graphs and not self._capture(*key):
            return False
        left = torch.tensor(
            [sampler.budgets[row] - 1 for row in depths[0].indices], device=rows.device
        )
        self._buffers.fill(state, left, inputs.seeds[rows], inputs.sampling.select(rows))
        graph, drawn = self._graphs[key]
        alive: torch.Tensor | slice = slice(len(rows))
        for depth, (rows, kept, _) in enumerate(depths, start=1):
            if depth > 1 and kept is not None:
                alive = kept if isinstance(alive, slice) else alive[kept]
            graph.replay()
            sampler.keep(rows, depth, drawn.select(alive))
        return True

    def _capture(self, num_rows: int, passes: Passes) -> bool:
        buffers = self._buffers
        assert buffers is not None
        # capturing runs the step: without a row that may draft it writes the null block alone
        buffers.left.zero_()
        try:
            self._graphs[num_rows, passes] = self.capturer.capture(
                lambda: self._step(buffers, num_rows, passes)
            )
        except RuntimeError as error:
            # A model that looks at values on the host cannot be captured; it drafts without graphs.
            log.warning(
                "draft steps cannot be captured as CUDA graphs (%s)",
                str(error).strip().splitlines()[0],
            )
            self.broken = True
            return False
        return True

    def _step(self, buffers: ChainBuffers, num_rows: int, passes: Passes) -> DraftStep:
        first = slice(num_rows)
        alive = buffers.left[first] > 0
        positions = torch.where(alive, buffers.positions[first] + 1, 0)
        tables = torch.where(alive[:, None], buffers.tables[first], NULL_BLOCK)
        # What a row that is done has left behind may be NaN, which the null block must not get.
        hidden = torch.where(alive[:, None], buffers.hidden[first], 0.0)
        context = PagedPass(self.pool, tables, positions, torch.ones_like(positions))
        step = self.drafter.read_drafts(buffers.tokens[first], hidden, positions, context)
        logits = self.drafter.draft_logits(step.head_input)
        sampling = SamplingRows(
            buffers.temperature[first],
            buffers.top_k[first],
            buffers.top_p[first],
            buffers.min_p[first],
            passes,
        )
        places = positions + self.drafter.ahead
        drawn = draw_tokens(logits, sampling, buffers.seeds[first], places, self.drafter.vocab_map)
        buffers.tokens[first].copy_(drawn.tokens)
        buffers.hidden[first].copy_(step.next_hidden)
        buffers.positions[first].add_(1)
        buffers.left[first].sub_(1)
        return drawn


def for_graphs(passes: Passes) -> Passes:
    """Few kinds, each of which can serve what needs less."""
    if passes.all_greedy:
        return passes
    most = 1 << (passes.top_k - 1).bit_length() if passes.top_k else 0
    return passes._replace(greedy=True, tempered=True, top_k=most)
