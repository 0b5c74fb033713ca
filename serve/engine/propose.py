"""The engine's side of its drafts: their inputs, what their caches hold of each request, and
invariant 6: a bad draft only slows.

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
    GrowsTrees,
    Proposal,
    Remembering,
    ServingDrafter,
)
from draftsmith.drafters.tree_shape import TreeShape
from draftsmith.errors import UserError
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.serve.audit.misreport import Misreport
from draftsmith.serve.drafts.served import ServedDraft
from draftsmith.serve.engine.proposal import BadProposal, Part, checked, joined
from draftsmith.serve.engine.round import Drafts
from draftsmith.serve.engine.scheduler import Row
from draftsmith.serve.requests.request import Request
from draftsmith.serve.requests.route import LIVE, shown
from draftsmith.serve.stats import EngineStats

log = logging.getLogger(__name__)


class Drafting:
    """`drafter` None means no speculation at all."""

    def __init__(
        self,
        drafter: ServingDrafter | None,
        pool: PagedPool | None,
        stats: EngineStats,
        *,
        vocab_size: int,
        tree: TreeShape | None = None,
        fallback: ServingDrafter | None = None,
        misreport: Misreport | None = None,
    ):
        if tree is not None and not isinstance(drafter, GrowsTrees):
            family = "no drafter" if drafter is None else f"a {drafter.family} drafter"
            raise UserError(
                f"tree is given with {family}, which grows none; leave it out or draft with "
                "eagle3, eagle1 or mtp"
            )
        self.pool, self.stats, self.vocab_size, self.tree = pool, stats, vocab_size, tree
        # Replaced, not changed: other threads look into it.
        self.drafts: dict[str, ServedDraft] = (
            {} if drafter is None else {LIVE: ServedDraft(LIVE, drafter)}
        )
        # Drafts from the text alone while a draft rests: a drafter without cache and taps.
        self.fallback = fallback
        self.misreport = misreport  # makes q wrong, for tests
        self.taps: tuple[int, ...] = drafter.taps if drafter is not None else ()

    @property
    def live(self) -> ServedDraft:
        return self.drafts[LIVE]

    @property
    def ready(self) -> list[str]:
        """Drafts that a new request may be given to."""
        return [name for name, draft in self.drafts.items() if draft.takes_requests]

    @property
    def retiring(self) -> bool:
        return any(draft.retired for draft in self.drafts.values())

    def put(self, name: str, drafter: ServingDrafter) -> None:
        """`drafter` has new weights, or is new: either deserves a new chance."""
        self.drafts = {**self.drafts, name: ServedDraft(name, drafter)}

    def retire(self, name: str) -> None:
        """No new requests for it; those it has keep it."""
        if name in self.drafts:
            self.drafts[name].retired = True

    def release(self, used: Collection[str]) -> list[str]:
        """Lets go of retired drafts that no request has; returns their names."""
        gone = [name for name, draft in self.drafts.items() if draft.retired and name not in used]
        if gone:
            self.drafts = {name: draft for name, draft in self.drafts.items() if name not in gone}
        return gone

    def propose(
        self,
        rows: Sequence[Row],
        tables: torch.Tensor,
        sampling: SamplingRows,
        seeds: torch.Tensor,
        *,
        adjust: Adjust | None = None,
        least_survival: float = 0.0,
    ) -> Drafts | None:
        """Drafts for `rows`, or None where nobody drafted any of them; it never raises."""
        wanted = Wanted(rows, tables, sampling, seeds, adjust, least_survival)
        awake = {name for name, draft in self.drafts.items() if draft.take_turn()}
        names = [row.request.route.draft for row in rows]
        if len(set(names)) == 1:
            return self._of(names[0], wanted, awake)
        parts = []
        for name in dict.fromkeys(names):
            indices = [index for index, own in enumerate(names) if own == name]
            drafts = self._of(name, wanted.select(indices), awake)
            if drafts is not None:
                parts.append(Part(indices, drafts))
        return joined(parts, len(rows)) if parts else None

    def _of(self, name: str, wanted: Wanted, awake: Collection[str]) -> Drafts | None:
        """Of rows that have the same draft."""
        if name not in awake and self.fallback is None:
            return None
        draft = self.drafts[name]
        try:
            inputs = self._inputs(wanted)
            if name not in awake:
                return self._stand_in(inputs, wanted.rows)
            drafts = self._checked(self._proposal(draft.drafter, inputs), wanted.rows)
        except Exception as error:
            # Any failure of a drafter is a matter of speed, never of the request (invariant 6).
            cause = "raised" if not isinstance(error, BadProposal) else "invalid"
            self._failed(
                draft, cause, error, rests=not any(row.request.repeatable for row in wanted.rows)
            )
            return None
        # Rows whose draws can be repeated do not decide whether it rests: later rounds with the
        # same draws would know of them.
        seen = [
            sound for sound, row in zip(drafts.sound, wanted.rows) if not row.request.repeatable
        ]
        if not all(drafts.sound):
            self._failed(draft, "nan", "a draft distribution without mass", rests=not all(seen))
        if seen and all(seen):
            draft.went_well()
        return drafts

    def _stand_in(self, inputs: DraftInputs, rows: Sequence[Row]) -> Drafts:
        assert self.fallback is not None
        drafts = self._checked(self.fallback.propose(inputs), rows)
        # The drafter has read nothing, so its cache must not advance.
        return replace(drafts, sound=[False] * len(rows), missed=frozenset(range(len(rows))))

    def _proposal(self, drafter: ServingDrafter, inputs: DraftInputs) -> Proposal:
        if self.tree is not None and isinstance(drafter, GrowsTrees):
            return drafter.propose_tree(inputs, self.tree)
        return drafter.propose(inputs)

    def _checked(self, proposal: Proposal, rows: Sequence[Row]) -> Drafts:
        if self.misreport is not None:
            proposal = self.misreport.apply(proposal, self.vocab_size)
        return checked(proposal, [row.k for row in rows], self.vocab_size)

    def _failed(self, draft: ServedDraft, cause: str, error: object, *, rests: bool) -> None:
        self.stats.fallbacks[cause] += 1
        if rests:
            draft.failed(cause, error)
        elif self.stats.fallbacks[cause].bit_count() == 1:
            # The 1st, 2nd, 4th, 8th, ... time: it may happen in every round.
            log.warning(
                "draft %s failed on seeded requests (%s: %s)", shown(draft.name), cause, error
            )

    def advance(self, row: Row, drafted: int, accepted: int, *, sound: bool) -> None:
        """After a round: what the draft cache of this request still holds. Taps of the round are in
        already."""
        request = row.request
        if sound:
            last = row.begin + row.count - 1
            drop_taps(request, self.live.drafter.cached_after(last, drafted, accepted))

    def finished(self, request: Request) -> None:
        """A request that asked to be kept out of learning, or whose draws can be repeated, is kept
        out of what requests share."""
        own = self.drafts.get(request.route.draft)
        for drafter in (None if own is None else own.drafter, self.fallback):
            if not isinstance(drafter, Remembering):
                continue
            try:
                drafter.finished(
                    request.id, request.tokens if request.learn and not request.repeatable else []
                )
            except Exception as error:
                self.stats.fallbacks["raised"] += 1
                log.warning("a drafter could not take in a finished text (%s)", error)

    def _inputs(self, wanted: Wanted) -> DraftInputs:
        requests = [row.request for row in wanted.rows]
        tokens: list[int] = []
        for request in requests:
            tokens += request.tokens[request.draft_cached :]
        taps = [tap for request in requests for tap in request.taps]
        return DraftInputs(
            tokens=torch.tensor(tokens, device=wanted.tables.device),
            starts=torch.tensor([request.draft_cached for request in requests]),
            lengths=torch.tensor(
                [request.num_tokens - request.draft_cached for request in requests]
            ),
            taps=_joined(taps) if self.taps else None,
            num_draft=torch.tensor([row.k for row in wanted.rows]),
            sampling=wanted.sampling,
            seeds=wanted.seeds,
            pool=self.pool,
            block_tables=wanted.tables,
            histories=[request.tokens for request in requests],
            request_ids=[request.id for request in requests],
            shares=[not request.repeatable for request in requests],
            adjust=wanted.adjust,
            least_survival=wanted.least_survival,
        )


class Wanted(NamedTuple):
    """What a round asks of its drafts; B rows."""

    rows: Sequence[Row]
    tables: torch.Tensor  # [B, max_blocks]
    sampling: SamplingRows
    seeds: torch.Tensor  # [B]
    adjust: Adjust | None
    least_survival: float

    def select(self, indices: list[int]) -> Wanted:
        at = torch.tensor(indices, device=self.tables.device)
        rows = [self.rows[index] for index in indices]
        adjust = None if self.adjust is None else _of_rows(self.adjust, at)
        return Wanted(
            rows,
            self.tables[at],
            self.sampling.select(at),
            self.seeds[at],
            adjust,
            self.least_survival,
        )


def _of_rows(adjust: Adjust, at: torch.Tensor) -> Adjust:
    """For some rows of the round, which number themselves."""
    return lambda logits, rows, prefixes: adjust(logits, at[rows], prefixes)


def keep_taps(request: Request, taps: torch.Tensor, begin: int, count: int) -> None:
    """The request's share `taps[begin : begin + count]` of a round, until its drafter has consumed
    it."""
    if count > 0:
        request.taps.append(taps[begin : begin + count])


def drop_taps(request: Request, cached: int) -> None:
    """The draft cache holds positions below `cached`: their taps are not needed any more."""
    surplus = cached - request.draft_cached
    request.draft_cached = cached
    while request.taps and surplus > 0:
        first = request.taps[0]
        if len(first) > surplus:
            request.taps[0] = first[surplus:]
            return
        surplus -= len(first)
        request.taps.pop(0)


def _joined(taps: list[torch.Tensor]) -> torch.Tensor:
    return taps[0] if len(taps) == 1 else torch.cat(taps)
