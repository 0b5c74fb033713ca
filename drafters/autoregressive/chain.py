"""Drafting a chain one token at a time, for drafters that read their own drafted tokens (feature
heads, draft LMs).

R rows that draft, H hidden width, T ragged positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from draftsmith.drafters.autoregressive.catch_up import Unread, read_unread
from draftsmith.drafters.autoregressive.chain_graphs import ChainGraphs
from draftsmith.drafters.autoregressive.draft_sampler import DraftSampler, RowsAtDepth
from draftsmith.drafters.autoregressive.state import (
    ChainState,
    DraftPrefill,
    ReadsCommitted,
    ReadsOwnDrafts,
)
from draftsmith.drafters.interface import Capturable, DraftInputs, Proposal
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.cuda_graphs import GraphRoom


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


class ChainLoop(DraftLoop, ReadsCommitted, Capturable):
    """A drafter that reads what was committed and then its own drafted tokens, one by one."""

    ends_chains = True
    _graphs: ChainGraphs | None = None

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
        if depths:
            draft_from(self, inputs, prefill, depths, sampler, graphs)


def draft_from(
    drafter: ReadsOwnDrafts,
    inputs: DraftInputs,
    prefill: DraftPrefill,
    depths: list[RowsAtDepth],
    sampler: DraftSampler,
    graphs: ChainGraphs | None,
) -> None:
    """Draft all depths from the states of `prefill`, into `sampler`."""
    if depths[0].kept is not None:
        prefill = prefill.select(depths[0].kept, depths[0].indices)
    logits = drafter.draft_logits(prefill.step.head_input)
    tokens = sampler.draw(depths[0].rows, 0, logits, prefill.positions + drafter.ahead)
    state = ChainState(tokens, prefill.step.next_hidden, prefill.positions, prefill.tables)
    if graphs is None or not graphs.draft(state, prefill.budgets, inputs, sampler, depths[1:]):
        _draft_eagerly(drafter, inputs, state, sampler, depths)


def _draft_eagerly(
    drafter: ReadsOwnDrafts,
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
