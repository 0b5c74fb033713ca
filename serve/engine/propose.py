"""Proposals of a round: the drafts' inputs, the state of their caches, and invariant 6: a bad
draft only slows.

Several drafts of one family and shape share the pool: a row is drafted by the draft that its
request was given, which writes its blocks. A round that needs one of them alone makes no detour.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.interface import (
    Adjust,
    DraftInputs,
    EndsChains,
    GrowsTrees,
    Proposal,
    Remembering,
    ServingDrafter,
    check_grows,
)
from draftsmith.drafters.tree_shape import TreeShape
from draftsmith.errors import UserError
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.dispatch import Upload, sent
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.serve.drafts.draft_set import DraftSet
from draftsmith.serve.drafts.served import ServedDraft
from draftsmith.serve.engine.proposal import (
    BadProposal,
    DraftCheck,
    Drafted,
    DraftSource,
    Part,
    RoundProposal,
    checked,
    joined,
)
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.requests.kept_taps import drop_taps
from draftsmith.serve.requests.request import LIVE, Request, shown

log = logging.getLogger(__name__)

FLAWS = {
    DraftCheck.MALFORMED: (
        "invalid",
        "tokens that there are not, or too many",
    ),
    DraftCheck.NO_MASS: ("nan", "a draft distribution without mass"),
}


class Proposer:
    """Proposals of the served drafts; a failure of any of them costs speed only."""

    def __init__(
        self,
        drafts: DraftSet,
        pool: PagedPool | None,
        *,
        vocab_size: int,
        tree: TreeShape | None = None,
        least_confidence: float = 0.0,
    ):
        drafter = drafts.live.drafter if drafts.served else None
        if tree is not None:
            check_grows(drafter, tree)
        if least_confidence > 0 and not (isinstance(drafter, EndsChains) and drafter.ends_chains):
            family = "no drafter" if drafter is None else f"a {drafter.family} drafter"
            raise UserError(
                f"least_confidence is {least_confidence:g} with {family}, which does not draft one "
                "token after another; leave it out or draft with eagle3, eagle1, mtp or a draft LM"
            )
        self.drafts, self.pool, self.stats = drafts, pool, drafts.stats
        self.least_confidence = least_confidence
        self.vocab_size, self.tree = vocab_size, tree
        self.taps: tuple[int, ...] = drafter.taps if drafter is not None else ()

    def propose(
        self,
        rows: Sequence[ScheduledRow],
        tables: torch.Tensor,
        sampling: SamplingRows,
        seeds: torch.Tensor,
        budgets: torch.Tensor,
        *,
        adjust: Adjust | None = None,
        least_survival: float = 0.0,
        upload: Upload,
    ) -> RoundProposal | None:
        """Drafted tokens of `rows`, None when no row has any; never raises.

        Args:
            tables: [B, blocks] block ids of the rows.
            seeds: [B] int64 draft seeds of the round.
            budgets: [B] int64, k of the rows.
            least_survival: chance of being kept below which a row's drafting ends.
            upload: what is on the device already.
        """
        asked = ProposalRequest(
            rows, tables, sampling, seeds, budgets, adjust, least_survival, upload
        )
        awake = {name for name, draft in self.drafts.served.items() if draft.take_turn()}
        by_draft = rows_by_draft(rows)
        if len(by_draft) == 1:
            (name,) = by_draft
            return self._of(name, asked, awake)
        parts = []
        for name, indices in by_draft.items():
            proposal = self._of(name, asked.select(indices), awake)
            if proposal is not None:
                parts.append(Part(indices, proposal))
        return joined(parts, len(rows)) if parts else None

    def _of(
        self, name: str, asked: ProposalRequest, awake: Collection[str]
    ) -> RoundProposal | None:
        """Proposal of rows that have the same draft."""
        if name not in awake:
            return None
        draft = self.drafts.served[name]
        try:
            return self._checked(self._proposal(draft.drafter, self._inputs(asked)), asked)
        except Exception as error:
            # Any failure of a drafter is a matter of speed, never of the request (invariant 6).
            cause = "raised" if not isinstance(error, BadProposal) else "invalid"
            self._failed(
                draft, cause, error, rests=not any(row.request.repeatable for row in asked.rows)
            )
            return None

    def read(
        self, proposal: RoundProposal, report: Sequence[list[int]], rows: Sequence[ScheduledRow]
    ) -> Drafted:
        """A proposal for `rows`, now that the host has its report. Decides which drafts have to
        rest."""
        drafted = Drafted.of(proposal, report, [row.k for row in rows], self.vocab_size)
        for name, indices in rows_by_draft(rows).items():
            own = [index for index in indices if drafted.sources[index] is not DraftSource.NONE]
            if not own:
                continue
            # Rows whose draws can be repeated do not decide whether it rests: later rounds with the
            # same draws would depend on them.
            counted = {drafted.checks[index] for index in own if not rows[index].request.repeatable}
            draft, found = self.drafts.served[name], {drafted.checks[index] for index in own}
            for check, (cause, error) in FLAWS.items():
                if check in found:
                    self._failed(draft, cause, error, rests=check in counted)
            if counted == {DraftCheck.SOUND}:
                draft.succeeded()
        return drafted

    def _proposal(self, drafter: ServingDrafter, inputs: DraftInputs) -> Proposal:
        if self.tree is not None and isinstance(drafter, GrowsTrees):
            return drafter.propose_tree(inputs, self.tree)
        return drafter.propose(inputs)

    def _checked(self, proposal: Proposal, asked: ProposalRequest) -> RoundProposal:
        drafter = self.drafts.live.drafter
        chains = isinstance(drafter, EndsChains) and drafter.ends_chains
        return checked(
            proposal,
            [row.k for row in asked.rows],
            asked.budgets,
            self.vocab_size,
            trees=self.tree is not None,
            # A draft that guesses how far it is kept may end far before its budget.
            exact=asked.least_survival > 0 and not chains and self.tree is None,
        )

    def _failed(self, draft: ServedDraft, cause: str, error: object, *, rests: bool) -> None:
        self.stats.fallbacks[cause] += 1
        if rests:
            draft.failed(cause, error)
        elif self.stats.fallbacks[cause].bit_count() == 1:
            # The 1st, 2nd, 4th, 8th, ... time: it may happen in every round.
            log.warning(
                "draft %s failed on seeded requests (%s: %s)", shown(draft.name), cause, error
            )

    def advance(self, row: ScheduledRow, drafted: int, accepted: int) -> None:
        """Move the end of the request's draft cache after a round. Taps of the round are in
        already."""
        last = row.begin + row.count - 1
        drop_taps(
            row.request, self.drafts.served[LIVE].drafter.cached_after(last, drafted, accepted)
        )

    def finished(self, request: Request) -> None:
        """Hand a finished text to its draft, if that remembers texts. A request that asked to be
        kept out of learning, or whose draws can be repeated, is kept out of what requests share."""
        own = self.drafts.served.get(request.draft_name)
        shared = request.options.learn and not request.repeatable
        if own is None or not isinstance(own.drafter, Remembering):
            return
        try:
            own.drafter.finished(request.id, request.tokens if shared else [])
        except Exception as error:
            self.stats.fallbacks["raised"] += 1
            log.warning("a drafter could not take in a finished text (%s)", error)

    def _inputs(self, asked: ProposalRequest) -> DraftInputs:
        tokens = tokens_to_read(asked.rows)
        starts, lengths, budgets = [], [], []
        taps, histories, request_ids, shares = [], [], [], []
        for row in asked.rows:
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
            tokens=asked.upload.of(tokens)[0],
            starts=host[0],
            lengths=host[1],
            taps=states,
            num_draft=host[2],
            sampling=asked.sampling,
            seeds=asked.seeds,
            pool=self.pool,
            block_tables=asked.tables,
            histories=histories,
            request_ids=request_ids,
            shares=shares,
            adjust=asked.adjust,
            least_survival=asked.least_survival,
            least_confidence=self.least_confidence,
        )


class ProposalRequest(NamedTuple):
    """Rows to draft and how to draw them; B rows."""

    rows: Sequence[ScheduledRow]
    tables: torch.Tensor  # [B, max_blocks]
    sampling: SamplingRows
    seeds: torch.Tensor  # [B]
    budgets: torch.Tensor  # [B]
    adjust: Adjust | None
    least_survival: float
    upload: Upload

    def select(self, indices: list[int]) -> ProposalRequest:
        (at,) = sent(self.tables.device, indices)
        rows = [self.rows[index] for index in indices]
        adjust = None if self.adjust is None else _of_rows(self.adjust, at)
        return ProposalRequest(
            rows,
            self.tables[at],
            self.sampling.select(at, indices),
            self.seeds[at],
            self.budgets[at],
            adjust,
            self.least_survival,
            self.upload,
        )


def rows_by_draft(rows: Sequence[ScheduledRow]) -> dict[str, list[int]]:
    """Indices of the rows of each draft, in the order in which they draft."""
    found: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(row.request.draft_name, []).append(index)
    return found


def tokens_by_draft(rows: Sequence[ScheduledRow]) -> list[list[int]]:
    """Tokens that each draft has to read in the round, as `Proposer` asks for them."""
    return [
        tokens_to_read([rows[index] for index in indices])
        for indices in rows_by_draft(rows).values()
    ]


def tokens_to_read(rows: Sequence[ScheduledRow]) -> list[int]:
    """Tokens of all rows that their drafts have not read."""
    tokens: list[int] = []
    for row in rows:
        tokens += row.request.tokens[row.request.draft.cached :]
    return tokens


def _of_rows(adjust: Adjust, at: torch.Tensor) -> Adjust:
    """`adjust` for the rows `at` of the round, renumbered from 0."""
    return lambda logits, rows, prefixes: adjust(logits, at[rows], prefixes)
