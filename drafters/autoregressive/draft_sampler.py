"""Draws drafted tokens depth by depth and keeps the distribution that each was drawn from
(invariant 2: q is what was sampled).

B rows of the batch, K depths, R rows that draft at a depth, Vd draft vocabulary, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from draftsmith.drafters.interface import Adjust, DraftInputs, Proposal
from draftsmith.kernels.dispatch import reads_freely, sent
from draftsmith.kernels.sampling.draw import draw
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.random_streams import Purpose
from draftsmith.kernels.sampling.vocabulary import check_sampled_head, scatter_to_target_vocab

Column: TypeAlias = "Sequence[int] | torch.Tensor"  # [n] of the host


class DraftStep(NamedTuple):
    """Drafted tokens of one depth, one per row."""

    tokens: torch.Tensor  # [R] target ids
    # [R, Vd] processed, over the draft's ids; None where all rows are greedy
    distribution: torch.Tensor | None
    # [R] the largest logits where all rows are greedy: not finite without mass
    best: torch.Tensor | None

    def select(self, chosen: torch.Tensor | slice) -> DraftStep:
        return DraftStep(
            self.tokens[chosen], *(None if part is None else part[chosen] for part in self[1:])
        )


class RowsAtDepth(NamedTuple):
    """Rows that draft at one depth."""

    rows: torch.Tensor  # [R] of the batch
    # [R] which of the rows of the depth before they are; None: all of them
    kept: torch.Tensor | None
    indices: list[int]  # the same rows on the host


class DepthPlan(NamedTuple):
    """Rows that draft at each depth, on the host: budgets are known there."""

    budgets: list[int]  # [B]
    alive: list[list[int]]  # rows of each depth
    # two a depth: which of the rows before it are left, none where all are; the rows themselves,
    # none where they are those before
    columns: list[list[int]]

    @classmethod
    def of(cls, budgets: list[int], rows: Sequence[int], most: int) -> DepthPlan:
        plan, before = cls(budgets, [], []), list(rows)
        for depth in range(most):
            kept = [index for index, row in enumerate(before) if budgets[row] > depth]
            if not kept:
                break
            fewer = len(kept) < len(before)
            if fewer:
                before = [before[index] for index in kept]
            plan.columns.append(kept if fewer else [])
            plan.columns.append(before if fewer or depth == 0 else [])
            plan.alive.append(before)
        return plan

    def budgets_of(self, rows: Sequence[int]) -> list[int]:
        return [self.budgets[row] for row in rows]

    def sent(
        self, device: torch.device, *columns: Column
    ) -> tuple[tuple[torch.Tensor, ...], list[RowsAtDepth]]:
        """`columns` and the plan on `device`, in one transfer."""
        parts = sent(device, *columns, *self.columns)
        mine = parts[len(columns) :]
        depths: list[RowsAtDepth] = []
        for indices, kept, chosen in zip(self.alive, mine[::2], mine[1::2], strict=True):
            rows = chosen if len(chosen) else depths[-1].rows
            depths.append(RowsAtDepth(rows, kept if len(kept) else None, indices))
        return parts[: len(columns)], depths


def draw_tokens(
    logits: torch.Tensor,
    sampling: SamplingRows,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_map: torch.Tensor | None,
) -> DraftStep:
    """Raw draft logits [R, Vd] -> the tokens of the absolute `positions` [R]. A CUDA graph can hold
    it."""
    if sampling.passes.all_greedy:
        best, tokens = logits.max(dim=-1)  # the first of equal logits
        distribution = None
    else:
        best = None
        tokens, distribution = draw(logits, sampling, seeds, positions, Purpose.DRAFT)
        # A distribution without mass (NaN weights) draws -1; token 0 at -inf means the same and can
        # be embedded.
        tokens = tokens.clamp(min=0)
    return DraftStep(tokens if vocab_map is None else vocab_map[tokens], distribution, best)


class DraftSampler:
    """Tokens, lengths and distributions of one proposal in the making.

    `vocab_map` [Vd] holds the target's id of each draft id, None for the same ids. Distributions
    are kept over the target's ids.
    """

    def __init__(
        self, inputs: DraftInputs, *, vocab_size: int, vocab_map: torch.Tensor | None = None
    ):
        self.inputs = inputs
        self.vocab_map = vocab_map
        self.budgets: list[int] = inputs.num_draft.tolist()
        size, self.depth = len(self.budgets), max(self.budgets)
        device = inputs.tokens.device
        self.tokens = torch.full((size, self.depth), -1, dtype=torch.int64, device=device)
        # A greedy draft is the argmax, and its distribution is one-hot: a batch of them needs no
        # distributions at all.
        greedy = inputs.sampling.passes.all_greedy
        # The type is named: a version being loaded on another thread changes torch's default for a
        # while.
        self.best = (
            torch.zeros(self.tokens.shape, dtype=torch.float32, device=device) if greedy else None
        )
        self.shape = (size, self.depth, vocab_size)
        self.logits = (
            None
            if greedy
            else torch.full(self.shape, -torch.inf, dtype=torch.float32, device=device)
        )
        self.lengths = torch.zeros(size, dtype=torch.int64, device=device)
        self._drafted_by_all = 0  # depths, not in `lengths` yet
        # [B] the product of the draft's largest probabilities so far; None: not asked for
        self.confidence = self.sure = None
        if inputs.least_confidence > 0:
            self.confidence = torch.ones(size, dtype=torch.float32, device=device)
            # [B] rows that have not ended, and [B] their tokens
            self.sure = torch.ones(size, dtype=torch.bool, device=device)
            self.offered = torch.zeros_like(self.lengths)

    def plan(self, rows: Sequence[int], most: int | None = None) -> DepthPlan:
        """Rows among `rows` (ascending) that draft at each depth, up to `most` depths."""
        depth = self.depth if most is None else min(self.depth, most)
        return DepthPlan.of(self.budgets, rows, depth)

    def draw(
        self, rows: torch.Tensor, depth: int, logits: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Raw draft logits [R, Vd] of `rows` [R] -> target ids [R], the tokens of the absolute
        `positions` [R]."""
        if self.confidence is not None and self.sure is not None:
            # Before anything of this depth is drawn (invariant 4). A distribution without mass is
            # no reason to end: it must be met, and make the draft rest.
            self.sure[rows] &= ~(self.confidence[rows] < self.inputs.least_confidence)
            self.offered[rows] += self.sure[rows]
            self.confidence[rows] *= largest_probability(logits)
        if self.inputs.adjust is not None:
            prefixes = self.tokens[rows, :depth]
            logits = adjusted(
                self.inputs.adjust, logits, rows, prefixes, self.shape[2], self.vocab_map
            )
        sampling, seeds = self.inputs.sampling, self.inputs.seeds
        if len(rows) < len(self.budgets):
            sampling, seeds = sampling.select(rows), seeds[rows]
        drawn = draw_tokens(logits, sampling, seeds, positions, self.vocab_map)
        self.keep(rows, depth, drawn)
        return drawn.tokens

    def going_on(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Which of `rows` [R] may draft further, before anything of the next depth is drawn or even
        read (invariant 4); None: all of them. Where a look costs a wait all go on, and what they
        draft behind their end is not offered."""
        if self.confidence is None or not reads_freely(self.confidence.device):
            return None
        return ~(self.confidence[rows] < self.inputs.least_confidence)

    def keep(self, rows: torch.Tensor, depth: int, drawn: DraftStep) -> None:
        # All rows are in their order, so that nothing has to be looked up.
        every = len(rows) == len(self.budgets)
        chosen = slice(None) if every else rows
        self.tokens[chosen, depth] = drawn.tokens
        if every:
            self._drafted_by_all = depth + 1
        else:
            self._note_lengths()
            self.lengths[chosen] = depth + 1
        if self.best is not None:
            assert drawn.best is not None  # greedy rows draw their most likely token
            self.best[chosen, depth] = drawn.best if every else drawn.best.float()
        elif self.logits is not None:
            check_sampled_head(drawn.distribution, self.vocab_map, self.shape[2])
            self.logits[chosen, depth] = scatter_to_target_vocab(
                drawn.distribution, self.vocab_map, self.shape[2]
            )

    def keep_depths(
        self,
        depths: Sequence[RowsAtDepth],
        drafted: Callable[[int], DraftStep],
        count: int,
        first: int = 0,
    ) -> None:
        """Keep what `drafted` gives of each depth, from the `first` on, for `count` rows of a
        graph."""
        alive: torch.Tensor | slice = slice(count)
        for depth, (rows, kept, _) in enumerate(depths, start=first):
            if kept is not None:
                alive = kept if isinstance(alive, slice) else alive[kept]
            self.keep(rows, depth, drafted(depth).select(alive))

    def _note_lengths(self) -> None:
        """Write how many depths all rows have drafted, once for all of them."""
        if self._drafted_by_all:
            self.lengths.fill_(self._drafted_by_all)
        self._drafted_by_all = 0

    def shorten(self, lengths: torch.Tensor) -> None:
        """Offer no more than `lengths` [B] of the drawn tokens."""
        self._note_lengths()
        self.lengths = torch.minimum(self.lengths, lengths)
        self.tokens.masked_fill_(
            torch.arange(self.depth, device=lengths.device) >= self.lengths[:, None], -1
        )

    def proposal(self) -> Proposal:
        self._note_lengths()
        if self.sure is not None:
            self.shorten(self.offered)
        has_mass = None if self.best is None else torch.isfinite(self.best)
        return Proposal(
            tokens=self.tokens, lengths=self.lengths, logits=self.logits, has_mass=has_mass
        )


def largest_probability(logits: torch.Tensor) -> torch.Tensor:
    """[R, V] raw -> [R] float32, at temperature 1 without filters."""
    logits = logits.float()
    return (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()


def adjusted(
    adjust: Adjust,
    logits: torch.Tensor,
    rows: torch.Tensor,
    prefixes: torch.Tensor,
    vocab_size: int,
    vocab_map: torch.Tensor | None,
) -> torch.Tensor:
    """Draft logits [R, Vd] after the requests' own adjustments. `rows` [R] are rows of the batch;
    each row draws as it would alone."""
    changed = adjust(scatter_to_target_vocab(logits, vocab_map, vocab_size), rows, prefixes)
    if vocab_map is not None:
        changed = changed[:, vocab_map]
    # A draft without any allowed token has not failed: what it draws instead is rejected.
    possible = (changed > -torch.inf).any(dim=-1, keepdim=True)
    return torch.where(possible, changed, logits)
