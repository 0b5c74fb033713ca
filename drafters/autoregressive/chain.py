"""Drafting a chain one token at a time, for drafters that read their own drafted tokens (feature
heads, draft LMs), and CUDA graphs of its steps: reading a drafted token and drawing the next one
costs one launch.

A graph is captured once for each (bucket of rows, filters in use), serves every k, and stays valid
across swaps: weights, pool and its own buffers never move. The buffers are those of all buckets and
hold the state from step to step, so that nothing is copied between the steps of a round, and
nothing read back. Rows that drafted all they may, and surplus rows of a bucket, read and write the
null block.

A decoding round's beginning has graphs too: reading the tokens committed in the round before and
drawing the first draft, for each (bucket of rows, bucket of tokens a row, filters in use). Prompts
are read without graphs: they are long enough to keep a device busy.

R rows that draft, H hidden width, T ragged positions, Vd draft vocabulary.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from draftsmith.drafters.autoregressive.draft_sampler import (
    DepthPlan,
    DraftSampler,
    DraftStep,
    RowsAtDepth,
    draw_tokens,
)
from draftsmith.drafters.autoregressive.padded_round import (
    PaddedRound,
    RoundGraphs,
    RoundShape,
    bucket,
    for_graphs,
)
from draftsmith.drafters.autoregressive.state import ChainState, HeadStep, Unread
from draftsmith.drafters.interface import Capturable, DraftInputs, Proposal
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.cuda_graphs import Graph, GraphRoom, GraphShapes
from draftsmith.kernels.sampling.filters import Passes, SamplingRows


class DraftLoop(ABC):
    vocab_size: int  # of the target

    @property
    @abstractmethod
    def vocab_map(self) -> torch.Tensor | None:
        """[Vd] the target's id of each draft id; None where they are the same."""

    def refresh(self) -> None:
        """Take over weights that a swap has written in place."""
        return

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        self.refresh()
        sampler = DraftSampler(inputs, vocab_size=self.vocab_size, vocab_map=self.vocab_map)
        self.draft(inputs, sampler)
        return sampler.proposal()

    @abstractmethod
    def draft(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        """Draft as many tokens as each row may, into `sampler`."""


class DraftPrefill(NamedTuple):
    """Drafter state after it read all committed tokens that it can. Rows without any have nothing
    to draft from."""

    indices: list[int]  # of the rows that can draft, ascending
    rows: torch.Tensor  # [R] the same rows
    budgets: torch.Tensor  # [R] tokens that each may draft
    positions: torch.Tensor  # [R] their last position with a state
    tables: torch.Tensor  # [R, max_blocks]
    step: HeadStep  # [R, H]

    def select(self, chosen: torch.Tensor, indices: list[int]) -> DraftPrefill:
        """Keep `chosen` [R'] of the R rows, which are `indices` of the batch."""
        return DraftPrefill(
            indices,
            self.rows[chosen],
            self.budgets[chosen],
            self.positions[chosen],
            self.tables[chosen],
            self.step.select(chosen),
        )


class ChainLoop(DraftLoop, Capturable):
    """A drafter that reads what was committed and then its own drafted tokens, one by one."""

    ahead: int  # the state at position t predicts the token at t + ahead
    ends_chains = True
    _graphs: ChainGraphs | None = None

    @abstractmethod
    def read_committed(
        self, tokens: torch.Tensor, taps: torch.Tensor | None, context: PagedPass
    ) -> HeadStep:
        """Committed tokens [T] and the target's states before them [T, n * H_t], where the drafter
        reads any. The positions of the pass are those of its own states."""

    @abstractmethod
    def read_drafts(
        self, tokens: torch.Tensor, hidden: torch.Tensor, context: PagedPass
    ) -> HeadStep:
        """Drafted tokens [T] of a pass and the states before them [T, H]."""

    @abstractmethod
    def draft_logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """[T, H] -> raw [T, Vd]."""

    def capture(self, room: GraphRoom) -> None:
        self._graphs = ChainGraphs(self, room)

    def draft(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        unread = Unread.of(inputs, self.ahead)
        if not unread.rows:
            return
        # A graph holds neither a request's adjustments, which are tables of one round or the host's
        # work, nor the ends of chains.
        is_plain = inputs.adjust is None and sampler.confidence is None
        graphs = self._graphs if is_plain else None
        plan = sampler.plan(unread.rows)
        if graphs is not None and graphs.draft_round(inputs, unread, plan, sampler):
            return
        prefill, depths = read_unread(self, inputs, unread, plan)
        if not depths:
            return
        logits = self.draft_logits(prefill.step.head_input)
        tokens = sampler.draw(depths[0].rows, 0, logits, prefill.positions + self.ahead)
        state = ChainState(tokens, prefill.step.next_hidden, prefill.positions, prefill.tables)
        if graphs is None or not graphs.draft(state, prefill.budgets, inputs, sampler, depths[1:]):
            _draft_eagerly(self, inputs, state, sampler, depths)


def read_unread(
    drafter: ChainLoop, inputs: DraftInputs, unread: Unread, plan: DepthPlan
) -> tuple[DraftPrefill, list[RowsAtDepth]]:
    """The states that rows draft from, of those at the first depth where there is one, and the plan
    on the device: everything from the host arrives in one copy."""
    (positions, tokens, rows, counts, ends, budgets), depths = plan.sent(
        inputs.tokens.device,
        unread.spread(unread.starts),
        unread.spread(unread.begins) if drafter.ahead > 1 else [],
        unread.rows,
        unread.counts,
        [end - 1 for end in itertools.accumulate(unread.counts)],
        plan.budgets_of(unread.rows),
    )
    every = len(unread.rows) == len(inputs.block_tables)
    tables = inputs.block_tables if every else inputs.block_tables[rows]
    context = PagedPass(inputs.own_pool, tables, positions, counts)
    ids = inputs.tokens[tokens] if drafter.ahead > 1 else inputs.tokens
    step = drafter.read_committed(ids, inputs.taps, context)
    prefill = DraftPrefill(unread.rows, rows, budgets, positions[ends], tables, step.select(ends))
    if depths and depths[0].kept is not None:
        prefill = prefill.select(depths[0].kept, depths[0].indices)
    return prefill, depths


def _draft_eagerly(
    drafter: ChainLoop,
    inputs: DraftInputs,
    state: ChainState,
    sampler: DraftSampler,
    depths: list[RowsAtDepth],
) -> None:
    """Draft the depths after the first, whose tokens are those of `state`."""
    ones = torch.ones_like(state.tokens)
    rows = depths[0].rows
    for depth, (allowed, kept, _) in enumerate(depths[1:], start=1):
        if (sure := sampler.going_on(rows)) is not None:
            kept = (torch.isin(rows, allowed) & sure).nonzero()[:, 0]
            allowed = rows[kept]
            if len(kept) == 0:
                return
        rows = allowed
        if kept is not None:
            state = state.select(kept)
        positions = state.positions + 1
        context = PagedPass(inputs.own_pool, state.tables, positions, ones[: len(rows)])
        step = drafter.read_drafts(state.tokens, state.hidden, context)
        tokens = sampler.draw(
            rows, depth, drafter.draft_logits(step.head_input), positions + drafter.ahead
        )
        state = ChainState(tokens, step.next_hidden, positions, state.tables)


class ChainBuffers:
    """State of as many rows as a batch may have, at fixed addresses. A bucket uses the first of
    them."""

    def __init__(
        self, num_rows: int, max_blocks: int, hidden: torch.Tensor, sampling: SamplingRows
    ):
        device = hidden.device
        whole = {"dtype": torch.int64, "device": device}
        self.tokens, self.positions, self.left, self.seeds = torch.zeros(4, num_rows, **whole)
        self.tables = torch.full((num_rows, max_blocks), NULL_BLOCK, **whole)
        self.hidden = torch.zeros(num_rows, hidden.shape[1], dtype=hidden.dtype, device=device)
        self.sampling = sampling.room(num_rows)

    def fill(
        self, state: ChainState, left: torch.Tensor, seeds: torch.Tensor, sampling: SamplingRows
    ) -> None:
        """`left` [R]: how many tokens each row may still draft; further rows draft none."""
        self.left.zero_()
        self.tables[: len(left), state.tables.shape[1] :] = NULL_BLOCK
        self.write(state, left, seeds, sampling)

    def write(
        self, state: ChainState, left: torch.Tensor, seeds: torch.Tensor, sampling: SamplingRows
    ) -> None:
        """The first R rows."""
        count, width = state.tables.shape
        pairs = [
            (self.tables[:, :width], state.tables),
            (self.tokens, state.tokens),
            (self.hidden, state.hidden),
            (self.positions, state.positions),
            (self.left, left),
            (self.seeds, seeds),
        ]
        for buffer, values in pairs:
            buffer[:count].copy_(values)
        self.sampling.take(sampling)


class ChainGraphs:
    def __init__(self, drafter: ChainLoop, room: GraphRoom):
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
