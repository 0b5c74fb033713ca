"""Proposals of a round: the drafts' inputs, the state of their caches, and invariant 6: a bad
draft only slows.

Several drafts of one family and shape share the pool: a row is drafted by the draft that its
request was given, which writes its blocks. A round that needs one of them alone makes no detour.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
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
from draftsmith.serve.audit.misreport import Misreport
from draftsmith.serve.drafts.draft_set import DraftSet
from draftsmith.serve.drafts.served import ServedDraft
from draftsmith.serve.engine.proposal import (
    BadProposal,
    checked,
    joined,
    part_reports,
    read_late,
    settled,
    unread,
)
from draftsmith.serve.engine.round import DraftSource, Part, RoundProposal
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.requests.kept_taps import drop_taps
from draftsmith.serve.requests.request import Request
from draftsmith.serve.requests.route import shown
from draftsmith.serve.stats import EngineStats

log = logging.getLogger(__name__)


class Proposer:
    """Proposals of the served drafts; a failure of any of them costs speed only."""

    def __init__(
        self,
        drafts: DraftSet,
        pool: PagedPool | None,
        stats: EngineStats,
        *,
        vocab_size: int,
        tree: TreeShape | None = None,
        least_confidence: float = 0.0,
        fallback: ServingDrafter | None = None,
        misreport: Misreport | None = None,
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
        self.drafts, self.pool, self.stats = drafts, pool, stats
        self.least_confidence = least_confidence
        self.vocab_size, self.tree = vocab_size, tree
        # Drafts from the text alone while a draft rests: a drafter without cache and taps.
        self.fallback = fallback
        self.misreport = misreport  # makes q wrong, for tests
        self.taps: tuple[int, ...] = drafter.taps if drafter is not None else ()

    def propose(
        self,
        rows: Sequence[ScheduledRow],
        tables: torch.Tensor,
        sampling: SamplingRows,
        seeds: torch.Tensor,
        *,
        adjust: Adjust | None = None,
        least_survival: float = 0.0,
        budgets: torch.Tensor | None = None,
        upload: Upload | None = None,
    ) -> RoundProposal | None:
        """Drafted tokens of `rows`, None when no row has any; never raises.

        Args:
            tables: [B, blocks] block ids of the rows.
            seeds: [B] int64 draft seeds of the round.
            least_survival: chance of being kept below which a row's drafting ends.
            budgets: [B] int64, k of the rows; tokens whose number follows from it may stay unread
                on the device, until `settle`. None: the host needs all tokens.
            upload: what is on the device already; None on a CPU.
        """
        asked = ProposalRequest(
            rows, tables, sampling, seeds, adjust, least_survival, budgets, upload
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
        if len({part.proposal.unread is None for part in parts}) == 2:
            # What the fallback gave is on the host, and the pass is laid out for all or for none.
            parts = self._read(parts, rows)
        return joined(parts, len(rows)) if parts else None

    def _read(self, parts: Sequence[Part], rows: Sequence[ScheduledRow]) -> list[Part]:
        """`parts` with their tokens on the host; without those that were malformed."""
        read = []
        for indices, own in parts:
            proposal: RoundProposal | None = own
            if own.unread is not None:
                report = own.unread.report.tolist()
                proposal = self._settled(own, report, [rows[index] for index in indices])
            if proposal is not None:
                read.append(Part(indices, proposal))
        return read

    def _of(
        self, name: str, asked: ProposalRequest, awake: Collection[str]
    ) -> RoundProposal | None:
        """Proposal of rows that have the same draft."""
        if name not in awake and self.fallback is None:
            return None
        draft = self.drafts.served[name]
        try:
            inputs, budgets = self._inputs(asked), self._late_budgets(asked)
            if name not in awake:
                return self._from_fallback(inputs, asked.rows)
            proposal = self._checked(self._proposal(draft.drafter, inputs), asked.rows, budgets)
        except Exception as error:
            # Any failure of a drafter is a matter of speed, never of the request (invariant 6).
            cause = "raised" if not isinstance(error, BadProposal) else "invalid"
            self._failed(
                draft, cause, error, rests=not any(row.request.repeatable for row in asked.rows)
            )
            return None
        if proposal.unread is None:
            self._count(draft, proposal, asked.rows)
        return proposal

    def settle(
        self, proposal: RoundProposal, report: Sequence[list[int]], rows: Sequence[ScheduledRow]
    ) -> RoundProposal | None:
        """The proposal of `rows` that stayed unread, by its report; None where it was malformed.
        The round was verified as it would have been with this one."""
        assert proposal.unread is not None
        parts = proposal.unread.parts
        if not parts:
            return self._settled(proposal, report, rows)
        read = []
        for (indices, own), lines in zip(parts, part_reports(proposal, report), strict=True):
            found = self._settled(own, lines, [rows[index] for index in indices])
            if found is not None:
                read.append(Part(indices, found))
        return settled(proposal, read) if read else None

    def _settled(
        self, proposal: RoundProposal, report: Sequence[list[int]], rows: Sequence[ScheduledRow]
    ) -> RoundProposal | None:
        """The same of one draft."""
        draft = self.drafts.served[rows[0].request.route.draft]
        try:
            read = read_late(proposal, report, self.vocab_size)
        except BadProposal as error:
            rests = not any(row.request.repeatable for row in rows)
            self._failed(draft, "invalid", error, rests=rests)
            return None
        self._count(draft, read, rows)
        return read

    def _late_budgets(self, asked: ProposalRequest) -> torch.Tensor | None:
        """Budgets of rows whose drafts have their lengths from them, so that the pass can be laid
        out without a look at the device; None where a draft guesses how far it is kept, or is made
        wrong."""
        if asked.budgets is None:
            return None
        drafter = self.drafts.live.drafter
        chains = isinstance(drafter, EndsChains) and drafter.ends_chains
        guesses = asked.least_survival > 0 and not chains and self.tree is None
        return None if guesses or self.misreport is not None else asked.budgets

    def _count(
        self, draft: ServedDraft, proposal: RoundProposal, rows: Sequence[ScheduledRow]
    ) -> None:
        """Decide if the draft has to rest after a proposal."""
        # Rows whose draws can be repeated do not decide whether it rests: later rounds with the
        # same draws would depend on them.
        counted = [fine for fine, row in zip(proposal.has_mass, rows) if not row.request.repeatable]
        if not all(proposal.has_mass):
            self._failed(draft, "nan", "a draft distribution without mass", rests=not all(counted))
        if counted and all(counted):
            draft.succeeded()

    def _from_fallback(self, inputs: DraftInputs, rows: Sequence[ScheduledRow]) -> RoundProposal:
        assert self.fallback is not None
        proposal = self._checked(self.fallback.propose(inputs), rows, None)
        # The drafter has read nothing, so its cache must not advance.
        return replace(
            proposal, has_mass=[False] * len(rows), sources=[DraftSource.NONE] * len(rows)
        )

    def _proposal(self, drafter: ServingDrafter, inputs: DraftInputs) -> Proposal:
        if self.tree is not None and isinstance(drafter, GrowsTrees):
            return drafter.propose_tree(inputs, self.tree)
        return drafter.propose(inputs)

    def _checked(
        self, proposal: Proposal, rows: Sequence[ScheduledRow], budgets: torch.Tensor | None
    ) -> RoundProposal:
        if self.misreport is not None:
            proposal = self.misreport.apply(proposal, self.vocab_size)
        allowed = [row.k for row in rows]
        if budgets is None:
            return checked(proposal, allowed, self.vocab_size)
        return unread(proposal, allowed, budgets, self.vocab_size)

    def _failed(self, draft: ServedDraft, cause: str, error: object, *, rests: bool) -> None:
        self.stats.fallbacks[cause] += 1
        if rests:
            draft.failed(cause, error)
        elif self.stats.fallbacks[cause].bit_count() == 1:
            # The 1st, 2nd, 4th, 8th, ... time: it may happen in every round.
            log.warning(
                "draft %s failed on seeded requests (%s: %s)", shown(draft.name), cause, error
            )

    def advance(self, row: ScheduledRow, drafted: int, accepted: int, *, has_mass: bool) -> None:
        """Move the end of the request's draft cache after a round. Taps of the round are in
        already."""
        request = row.request
        if has_mass:
            last = row.begin + row.count - 1
            drop_taps(request, self.drafts.live.drafter.cached_after(last, drafted, accepted))

    def finished(self, request: Request) -> None:
        """Hand a finished text to the drafters that remember texts. A request that asked to be kept
        out of learning, or whose draws can be repeated, is kept out of what requests share."""
        own = self.drafts.served.get(request.route.draft)
        shared = request.options.learn and not request.repeatable
        for drafter in (None if own is None else own.drafter, self.fallback):
            if not isinstance(drafter, Remembering):
                continue
            try:
                drafter.finished(request.id, request.tokens if shared else [])
            except Exception as error:
                self.stats.fallbacks["raised"] += 1
                log.warning("a drafter could not take in a finished text (%s)", error)

    def _inputs(self, asked: ProposalRequest) -> DraftInputs:
        tokens = unread_tokens(asked.rows)
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
                taps.append(tap[:])
        states = None
        if self.taps:
            states = taps[0] if len(taps) == 1 else torch.cat(taps)
        return DraftInputs(
            tokens=torch.tensor(tokens) if asked.upload is None else asked.upload.of(tokens)[0],
            starts=torch.tensor(starts),
            lengths=torch.tensor(lengths),
            taps=states,
            num_draft=torch.tensor(budgets),
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
    adjust: Adjust | None
    least_survival: float
    budgets: torch.Tensor | None  # [B]
    upload: Upload | None

    def select(self, indices: list[int]) -> ProposalRequest:
        (at,) = sent(self.tables.device, indices)
        rows = [self.rows[index] for index in indices]
        adjust = None if self.adjust is None else _of_rows(self.adjust, at)
        return ProposalRequest(
            rows,
            self.tables[at],
            self.sampling.select(at, indices),
            self.seeds[at],
            adjust,
            self.least_survival,
            None if self.budgets is None else self.budgets[at],
            self.upload,
        )


def rows_by_draft(rows: Sequence[ScheduledRow]) -> dict[str, list[int]]:
    """Indices of the rows of each draft, in the order in which they draft."""
    found: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(row.request.route.draft, []).append(index)
    return found


def unread_by_draft(rows: Sequence[ScheduledRow]) -> list[list[int]]:
    """Tokens that each draft has to read in the round, as `Proposer` asks for them."""
    return [
        unread_tokens([rows[index] for index in indices])
        for indices in rows_by_draft(rows).values()
    ]


def unread_tokens(rows: Sequence[ScheduledRow]) -> list[int]:
    """Tokens of all rows that their drafts have not read."""
    tokens: list[int] = []
    for row in rows:
        tokens += row.request.tokens[row.request.draft.cached :]
    return tokens


def _of_rows(adjust: Adjust, at: torch.Tensor) -> Adjust:
    """`adjust` for the rows `at` of the round, renumbered from 0."""
    return lambda logits, rows, prefixes: adjust(logits, at[rows], prefixes)
