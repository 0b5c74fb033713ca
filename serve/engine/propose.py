"""Proposal of a round: the draft's inputs, the state of its cache, and invariant 6: a bad draft
only slows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from draftsmith.drafters.interface import (
    DraftInputs,
    EndsChains,
    GrowsTrees,
    Proposal,
    Remembering,
    check_grows,
)
from draftsmith.drafters.tree_shape import TreeShape
from draftsmith.errors import UserError
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.dispatch import sent
from draftsmith.serve.engine.live_draft import LiveDraft
from draftsmith.serve.engine.proposal import (
    BadProposal,
    DraftCheck,
    Drafted,
    RoundProposal,
    checked,
)
from draftsmith.serve.engine.round import Round
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.requests.kept_taps import drop_taps
from draftsmith.serve.requests.request import Request

log = logging.getLogger(__name__)

FLAWS = {
    DraftCheck.MALFORMED: ("invalid", "tokens that there are not, or too many"),
    DraftCheck.NO_MASS: ("nan", "a draft distribution without mass"),
}


class Proposer:
    """Proposals of the served draft, whose failures cost speed only.

    Args:
        greedy: as for `draft_temperature`.
    """

    def __init__(
        self,
        draft: LiveDraft,
        pool: PagedPool | None,
        *,
        vocab_size: int,
        tree: TreeShape | None = None,
        least_confidence: float = 0.0,
        greedy: bool = False,
    ):
        drafter = draft.drafter
        if tree is not None:
            check_grows(drafter, tree)
        if least_confidence > 0 and not (isinstance(drafter, EndsChains) and drafter.ends_chains):
            family = "no drafter" if drafter is None else f"a {drafter.family} drafter"
            raise UserError(
                f"least_confidence is {least_confidence:g} with {family}, which does not draft one "
                "token after another; leave it out or draft with eagle3, eagle1, mtp or a draft LM"
            )
        self.draft, self.drafter, self.pool, self.stats = draft, drafter, pool, draft.stats
        self.least_confidence, self.greedy = least_confidence, greedy
        self.vocab_size, self.tree = vocab_size, tree
        self.taps: tuple[int, ...] = drafter.taps if drafter is not None else ()

    def propose(self, round: Round) -> RoundProposal | None:
        """Drafted tokens of the rows that draft, None when no row has any; never raises."""
        if not self.draft.take_turn():
            return None
        rows = round.schedule.drafting
        try:
            inputs = self._inputs(rows, round)
            return self._checked(self._proposal(inputs), rows, round.sampling.budgets, inputs)
        except Exception as error:
            # Any failure of a drafter is a matter of speed, never of the request (invariant 6).
            cause = "raised" if not isinstance(error, BadProposal) else "invalid"
            rests = not any(row.request.repeatable for row in rows)
            self._failed(cause, error, rests=rests)
            return None

    def read(
        self, proposal: RoundProposal, report: Sequence[list[int]], rows: Sequence[ScheduledRow]
    ) -> Drafted:
        """A proposal for `rows`, now that the host has its report. Decides whether the draft has to
        rest."""
        drafted = Drafted.of(proposal, report, [row.k for row in rows], self.vocab_size)
        # Rows whose draws can be repeated do not decide whether it rests: later rounds with the
        # same draws would depend on them.
        counted = {
            check
            for row, check in zip(rows, drafted.checks, strict=True)
            if not row.request.repeatable
        }
        for check, (cause, error) in FLAWS.items():
            if check in drafted.checks:
                self._failed(cause, error, rests=check in counted)
        if counted == {DraftCheck.SOUND}:
            self.draft.succeeded()
        return drafted

    def _proposal(self, inputs: DraftInputs) -> Proposal:
        assert self.drafter is not None, "without a drafter no row drafts"
        if self.tree is not None and isinstance(self.drafter, GrowsTrees):
            return self.drafter.propose_tree(inputs, self.tree)
        return self.drafter.propose(inputs)

    def _checked(
        self,
        proposal: Proposal,
        rows: Sequence[ScheduledRow],
        budgets: torch.Tensor,
        inputs: DraftInputs,
    ) -> RoundProposal:
        chains = isinstance(self.drafter, EndsChains) and self.drafter.ends_chains
        return checked(
            proposal,
            [row.k for row in rows],
            budgets[: len(rows)],
            self.vocab_size,
            trees=self.tree is not None,
            # A draft that guesses how far it is kept may end far before its budget.
            exact=inputs.least_survival > 0 and not chains and self.tree is None,
        )

    def _failed(self, cause: str, error: object, *, rests: bool) -> None:
        self.stats.fallbacks[cause] += 1
        if rests:
            self.draft.failed(cause, error)
        elif self.stats.fallbacks[cause].bit_count() == 1:
            # The 1st, 2nd, 4th, 8th, ... time: it may happen in every round.
            log.warning("the draft failed on seeded requests (%s: %s)", cause, error)

    def advance(self, row: ScheduledRow, drafted: int, accepted: int) -> None:
        """Move the end of the request's draft cache after a round. Taps of the round are in
        already."""
        assert self.drafter is not None, "without a drafter no row drafts"
        last = row.begin + row.count - 1
        drop_taps(row.request, self.drafter.cached_after(last, drafted, accepted))

    def finished(self, request: Request) -> None:
        """Hand a finished text to the draft, if that remembers texts. A request that asked to be
        kept out of learning, or whose draws can be repeated, is kept out of what requests share."""
        if not isinstance(self.drafter, Remembering):
            return
        shared = request.options.learn and not request.repeatable
        try:
            self.drafter.finished(request.id, request.tokens if shared else [])
        except Exception as error:
            self.stats.fallbacks["raised"] += 1
            log.warning("a drafter could not take in a finished text (%s)", error)

    def _inputs(self, rows: Sequence[ScheduledRow], round: Round) -> DraftInputs:
        count, sampling, plan = len(rows), round.sampling, round.schedule.plan
        starts, lengths, budgets = [], [], []
        taps, histories, request_ids, shares = [], [], [], []
        for row in rows:
            request, cached = row.request, row.request.draft.cached
            starts.append(cached)
            lengths.append(len(request.tokens) - cached)
            budgets.append(row.k)
            histories.append(request.tokens)
            request_ids.append(request.id)
            shares.append(not request.repeatable)
            for tap in request.draft.taps:
                taps.append(tap if isinstance(tap, torch.Tensor) else tap[:])
        states = None
        if self.taps:
            states = taps[0] if len(taps) == 1 else torch.cat(taps)
        host = sent(torch.device("cpu"), starts, lengths, budgets)
        return DraftInputs(
            tokens=round.upload.of(tokens_to_read(rows))[0],
            starts=host[0],
            lengths=host[1],
            taps=states,
            num_draft=host[2],
            sampling=sampling.draft_distributions(count, greedy=self.greedy),
            seeds=sampling.draft_seeds[:count],
            pool=self.pool,
            block_tables=round.tables[:count],
            histories=histories,
            request_ids=request_ids,
            shares=shares,
            adjust=sampling.adjust,
            least_survival=0.0 if plan is None else plan.least_survival,
            least_confidence=self.least_confidence,
        )


def tokens_to_read(rows: Sequence[ScheduledRow]) -> list[int]:
    """Tokens of all rows that the draft has not read."""
    tokens: list[int] = []
    for row in rows:
        tokens += row.request.tokens[row.request.draft.cached :]
    return tokens
