"""A decoding round in the shape of a graph: few tokens of each row to read, all at fixed addresses.

A row with fewer tokens than the shape has repeats its last one, at the same place; surplus rows
read and write the null block. R rows of the graph, W tokens of each, B rows of the batch, H_t width
of a tap.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import torch

from draftsmith.drafters.autoregressive.draft_sampler import (
    DepthPlan,
    DraftStep,
    RowsAtDepth,
    draw_tokens,
)
from draftsmith.drafters.autoregressive.state import Unread
from draftsmith.drafters.interface import DraftInputs
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.cuda_graphs import GraphRoom, GraphShapes, row_buckets
from draftsmith.kernels.sampling.filters import Passes, SamplingRows

WIDTHS = (2, 4, 8, 16)  # tokens of a row that may be unread; prompts have more
EVERY_TOKEN = 1 << 30  # more than any vocabulary has


def bucket(sizes: Sequence[int], size: int) -> int:
    """The smallest of the ascending `sizes` that `size` fits into."""
    return sizes[bisect.bisect_left(sizes, size)]


def for_graphs(passes: Passes) -> Passes:
    """Three kinds, each of which can serve what needs less: Triton's draws filter by all or by
    nothing."""
    if passes.all_greedy:
        return passes
    filters = passes.filtered
    return Passes(True, False, True, EVERY_TOKEN if filters else 0, filters, filters)


class RoundInputs:
    """Inputs of a round of as many rows as a batch may have."""

    def __init__(self, num_rows: int, max_blocks: int, like: DraftInputs):
        most = num_rows * (WIDTHS[-1] + 1)  # the newest token may have no state yet
        whole = {"dtype": torch.int64, "device": like.tokens.device}
        # What the host says of each row of the graph, in the order of `numbers_of`.
        self.numbers = torch.zeros(6, num_rows, **whole)
        self.tokens = torch.zeros(most, **whole)
        self.taps = None if like.taps is None else like.taps.new_zeros(most, like.taps.shape[1])
        self.tables = torch.full((num_rows, max_blocks), NULL_BLOCK, **whole)
        self.seeds = torch.zeros(num_rows, **whole)
        self.sampling = like.sampling.room(num_rows)

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
        self.sampling.take(inputs.sampling)


def numbers_of(unread: Unread, plan: DepthPlan, num_rows: int) -> list[int]:
    """[6 * num_rows]: row of the batch, tokens to read, position of the first, where it and its
    taps are, tokens to draft. Zeros for surplus rows."""
    ends = list(itertools.accumulate(unread.counts))
    taps = [end - count for end, count in zip(ends, unread.counts)]
    columns = (*unread, taps, plan.budgets_of(unread.rows))
    padding = [0] * (num_rows - len(unread.rows))
    return [number for column in columns for number in (*column, *padding)]


class PaddedRound(NamedTuple):
    """Rows of a graph, made from `RoundInputs` on the device."""

    inputs: RoundInputs
    counts: torch.Tensor  # [R] tokens to read; 0: a surplus row
    starts: torch.Tensor  # [R] position of the first
    begins: torch.Tensor  # [R] where it is among the inputs' tokens
    taps_at: torch.Tensor  # [R] where its taps are
    budgets: torch.Tensor  # [R] tokens to draft
    tables: torch.Tensor  # [R, max_blocks]
    seeds: torch.Tensor  # [R]
    sampling: SamplingRows  # of R rows

    @classmethod
    def of(cls, inputs: RoundInputs, num_rows: int, passes: Passes) -> PaddedRound:
        which, counts, starts, begins, taps_at, budgets = inputs.numbers[:, :num_rows]
        return cls(
            inputs,
            counts,
            starts,
            begins,
            taps_at,
            budgets,
            tables=torch.where((counts > 0)[:, None], inputs.tables[which], NULL_BLOCK),
            seeds=inputs.seeds[which],
            sampling=replace(inputs.sampling.select(which), passes=passes),
        )

    @property
    def last(self) -> torch.Tensor:
        """[R] index of the last token to read among those of its row."""
        return (self.counts - 1).clamp(min=0)

    def slots(self, width: int) -> torch.Tensor:
        """[R, width] which token of its row each slot reads."""
        return torch.arange(width, device=self.counts.device).minimum(self.last[:, None])

    def tokens(self, slots: torch.Tensor) -> torch.Tensor:
        """Token ids [R, n] of `slots` [R, n]."""
        return self.inputs.tokens[self.begins[:, None] + slots]

    def taps(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Taps [R, n, H_t] of `slots` [R, n]; None where the drafter reads none."""
        if self.inputs.taps is None:
            return None
        # A surplus row would read those of another, which may be NaN.
        real = (self.counts > 0)[:, None, None]
        return torch.where(real, self.inputs.taps[self.taps_at[:, None] + slots], 0.0)

    def draw(
        self, logits: torch.Tensor, positions: torch.Tensor, vocab_map: torch.Tensor | None
    ) -> DraftStep:
        """Raw draft logits [R, Vd] -> the tokens of the absolute `positions` [R]."""
        return draw_tokens(logits, self.sampling, self.seeds, positions, vocab_map)


class RoundShape(NamedTuple):
    num_rows: int
    width: int  # tokens of a row to read
    depths: int  # drafts of a row
    passes: Passes


Output = TypeVar("Output")


class RoundGraphs(Generic[Output]):
    """CUDA graphs of what `run` makes of a decoding round, by shape. Rounds with prompts have none:
    these are long enough to keep a device busy."""

    def __init__(
        self, what: str, run: Callable[[PaddedRound, RoundShape], Output], room: GraphRoom
    ):
        self.run, self.pool, self.max_blocks = run, room.pool, room.max_blocks
        self.rows = row_buckets(room.max_batch)
        self.shapes = GraphShapes[RoundShape, Output](room.capturer, what)
        self._inputs: RoundInputs | None = None

    def shape_of(self, inputs: DraftInputs, unread: Unread, depths: int) -> RoundShape | None:
        """None where the round has no graph."""
        longest = max(unread.counts)
        if inputs.pool is not self.pool or longest > WIDTHS[-1]:
            return None
        num_rows, width = bucket(self.rows, len(unread.rows)), bucket(WIDTHS, longest)
        return RoundShape(num_rows, width, depths, for_graphs(inputs.sampling.passes))

    def replay(
        self, shape: RoundShape, inputs: DraftInputs, unread: Unread, plan: DepthPlan
    ) -> tuple[Output, list[RowsAtDepth]] | None:
        """Output of the graph of `shape`, and the plan on the device. None, and nothing done, where
        the round must run without a graph."""
        if self._inputs is None:
            self._inputs = RoundInputs(self.rows[-1], self.max_blocks, inputs)
        static = self._inputs

        def run() -> Output:
            return self.run(PaddedRound.of(static, shape.num_rows, shape.passes), shape)

        # Without a row that has tokens to read it writes the null block alone.
        found = self.shapes.find(shape, run, before=static.numbers.zero_)
        if found is None:
            return None
        numbers = numbers_of(unread, plan, shape.num_rows)
        (sent_numbers,), depths = plan.sent(inputs.tokens.device, numbers)
        static.fill(inputs, sent_numbers.view(-1, shape.num_rows))
        graph, output = found
        graph.replay()
        return output, depths
