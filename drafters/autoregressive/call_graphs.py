"""CUDA graphs of whole drafting calls, for drafters that make all drafts of a round in one pass or
without keys and values.

Rounds with prompts, penalties, masks, or ends chosen by confidence are drafted without.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

from draftsmith.drafters.autoregressive.chain import DraftLoop
from draftsmith.drafters.autoregressive.draft_sampler import DepthPlan, DraftSampler, DraftStep
from draftsmith.drafters.autoregressive.padded_round import PaddedRound, RoundGraphs, RoundShape
from draftsmith.drafters.autoregressive.state import Unread
from draftsmith.drafters.interface import Capturable, DraftInputs
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.cuda_graphs import GraphRoom

MOST_LOGITS = 1 << 24  # that a graph keeps, of all its drafts: 64 MiB


class CallLoop(DraftLoop, Capturable):
    """A drafter whose drafting calls are captured whole."""

    max_depth: int | None = None  # tokens that it can draft; None: any number
    _rounds: RoundGraphs[list[DraftStep]] | None = None

    def capture(self, room: GraphRoom) -> None:
        run = partial(self.draft_padded, pool=room.pool)
        self._rounds = RoundGraphs("drafting calls", run, room)

    def draft(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        if self._rounds is None or not self._draft_round(self._rounds, inputs, sampler):
            self.draft_call(inputs, sampler)

    def _draft_round(
        self, rounds: RoundGraphs[list[DraftStep]], inputs: DraftInputs, sampler: DraftSampler
    ) -> bool:
        """False, and nothing done, where the round must be drafted without graphs."""
        unread = Unread.of(inputs, ahead=2)
        plan = sampler.plan(unread.rows, self.max_depth)
        if not _has_graph(inputs, plan):
            return False
        shape = rounds.shape_of(inputs, unread, len(plan.alive))
        if shape is None or _is_large(shape, sampler):
            return False
        found = rounds.replay(shape, inputs, unread, plan)
        if found is None:
            return False
        drawn, depths = found
        sampler.keep_depths(depths, drawn.__getitem__, len(unread.rows))
        return True

    @abstractmethod
    def draft_call(self, inputs: DraftInputs, sampler: DraftSampler) -> None:
        """`draft` without graphs."""

    @abstractmethod
    def draft_padded(
        self, padded: PaddedRound, shape: RoundShape, pool: PagedPool | None
    ) -> list[DraftStep]:
        """Drafts of all depths, for every row of the graph."""


def _has_graph(inputs: DraftInputs, plan: DepthPlan) -> bool:
    # A row without anything to read has no place in a graph.
    drafting = sum(budget > 0 for budget in plan.budgets)
    everyone = bool(plan.alive) and len(plan.alive[0]) == drafting
    return everyone and inputs.adjust is None and inputs.least_survival <= 0


def _is_large(shape: RoundShape, sampler: DraftSampler) -> bool:
    num_logits = shape.num_rows * shape.depths * sampler.shape[2]
    return not shape.passes.all_greedy and num_logits > MOST_LOGITS
