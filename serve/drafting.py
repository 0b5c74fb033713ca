"""The engine's side of a drafter: its inputs, what its cache holds of each request, and law 6: a bad draft changes only speed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draftsmith.drafters.interface import Adjust, DraftInputs, GrowsTrees, Proposal, Remembering, ServingDrafter
from draftsmith.drafters.tree_shape import TreeShape
from draftsmith.errors import UserError
from draftsmith.kernels.filters import SamplingRows
from draftsmith.kernels.paged_attention import PagedPool
from draftsmith.serve.request import Request
from draftsmith.serve.scheduler import Row
from draftsmith.serve.stats import EngineStats
from draftsmith.serve.trees import RoundTree, check_tree

log = logging.getLogger(__name__)

PROBE = 4  # a draft in quarantine drafts in one round of so many: enough to be judged by
LONGEST_PAUSE = 256  # rounds without drafting after a drafter has failed again and again


@dataclass(frozen=True)
class Drafts:
    """A proposal as the round uses it; row b of the drafting rows."""

    chains: list[list[int]]  # usable tokens; empty where the drafter gave none or its first law failed
    sound: list[bool]  # False: what the drafter did for this row is not trusted, its cache does not advance
    tokens: torch.Tensor  # [B, K] int64
    lengths: torch.Tensor  # [B] int64
    logits: torch.Tensor | None  # [B, K, V] processed; of trees [Q, V]
    tree: RoundTree | None = None  # how the tokens hang together when they are no chains
    stand_in: bool = False  # the fallback's, which say nothing about the served draft
    sampled: bool = True  # False: deterministic, no law was drawn from
    copied: frozenset[int] = frozenset()  # rows copied from text

    def offered(self, index: int) -> int:
        """How deep the row's drafts go: a round keeps at most so many of them."""
        if index >= len(self.chains):
            return 0
        return len(self.chains[index]) if self.tree is None else self.tree.height(index)

    def drawn(self, index: int) -> bool:
        """Whether the row was drafted by drawing from the draft's law, at the temperature chosen for it."""
        return self.sampled and index not in self.copied and self.offered(index) > 0


class BadProposal(ValueError):
    """The drafter returned something no verification should see."""


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
    ):
        if tree is not None and not isinstance(drafter, GrowsTrees):
            family = "no drafter" if drafter is None else f"a {drafter.family} drafter"
            raise UserError(f"tree is given with {family}, which grows none; leave it out or draft with eagle3, eagle1 or mtp")
        self.drafter, self.pool, self.stats, self.vocab_size, self.tree = drafter, pool, stats, vocab_size, tree
        # Drafts from the text alone while the drafter rests: a drafter without cache and taps.
        self.fallback = fallback
        self.taps: tuple[int, ...] = drafter.taps if drafter is not None else ()
        self._failures = 0
        self._pause = 0
        self._resting = False
        # The draft was made for other weights of the target, until it is shown to be worth its time with these.
        self.quarantined = False

    def reset(self) -> None:
        """New weights deserve a new chance."""
        self._failures = self._pause = 0
        self.quarantined = False

    def take_turn(self) -> bool:
        """Whether this round may draft; counts down the pause that follows failures, or a turn in quarantine."""
        self._resting = self._pause > 0
        if self._resting:
            self._pause -= 1
            return self.fallback is not None
        if self.quarantined:
            self._pause = PROBE - 1
        return self.drafter is not None

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
        """Drafts for `rows`, or None when the drafter failed as a whole; it never raises."""
        try:
            inputs = replace(self._inputs(rows, tables, sampling, seeds, adjust), least_survival=least_survival)
            if self._resting:
                return self._stand_in(inputs, rows)
            drafts = self._checked(self._proposal(inputs), rows)
        except Exception as error:
            # Any failure of a drafter is a matter of speed, never of the request (law 6).
            self._failed("raised" if not isinstance(error, BadProposal) else "invalid", error)
            return None
        if all(drafts.sound):
            self._failures = 0
        else:
            self._failed("nan", "a draft law without mass")
        return drafts

    def _stand_in(self, inputs: DraftInputs, rows: Sequence[Row]) -> Drafts:
        assert self.fallback is not None
        drafts = self._checked(self.fallback.propose(inputs), rows)
        # The drafter has read nothing, so its cache must not advance.
        return replace(drafts, sound=[False] * len(rows), stand_in=True)

    def _proposal(self, inputs: DraftInputs) -> Proposal:
        if self.tree is not None and isinstance(self.drafter, GrowsTrees):
            return self.drafter.propose_tree(inputs, self.tree)
        assert self.drafter is not None
        return self.drafter.propose(inputs)

    def advance(self, row: Row, drafted: int, accepted: int, *, sound: bool) -> None:
        """After a round: what the draft cache of this request still holds. Taps of the round are in already."""
        request = row.request
        if sound and self.drafter is not None:
            last = row.begin + row.count - 1
            drop_taps(request, self.drafter.cached_after(last, drafted, accepted))

    def finished(self, request: Request) -> None:
        """A request that asked to be kept out of learning, or may not share, is kept out of what requests share."""
        for drafter in (self.drafter, self.fallback):
            if not isinstance(drafter, Remembering):
                continue
            try:
                drafter.finished(request.id, request.tokens if request.learn and request.shares else [])
            except Exception as error:
                self._failed("raised", error)

    def _inputs(
        self, rows: Sequence[Row], tables: torch.Tensor, sampling: SamplingRows, seeds: torch.Tensor, adjust: Adjust | None
    ) -> DraftInputs:
        tokens: list[int] = []
        for row in rows:
            tokens += row.request.tokens[row.request.draft_cached :]
        taps = [tap for row in rows for tap in row.request.taps]
        device = tables.device
        return DraftInputs(
            tokens=torch.tensor(tokens, device=device),
            starts=torch.tensor([row.request.draft_cached for row in rows]),
            lengths=torch.tensor([row.request.num_tokens - row.request.draft_cached for row in rows]),
            taps=_joined(taps) if self.taps else None,
            num_draft=torch.tensor([row.k for row in rows]),
            sampling=sampling,
            seeds=seeds,
            pool=self.pool,
            block_tables=tables,
            histories=[row.request.tokens for row in rows],
            request_ids=[row.request.id for row in rows],
            shares=[row.request.shares for row in rows],
            adjust=adjust,
        )

    def _checked(self, proposal: Proposal, rows: Sequence[Row]) -> Drafts:
        width = proposal.tokens.shape[1]
        # The round's one look at what was drafted.
        parts = [proposal.lengths[:, None], proposal.tokens]
        if (massive := self._massive(proposal)) is not None:
            parts.append(massive.long())
        told: list[list[int]] = torch.cat(parts, dim=1).tolist()
        lengths = [row[0] for row in told]
        if len(lengths) != len(rows) or any(length > row.k for length, row in zip(lengths, rows)):
            raise BadProposal(f"drafted {lengths} tokens where {[row.k for row in rows]} were allowed")
        chains = [row[1 : 1 + length] for row, length in zip(told, lengths)]
        if any(not 0 <= token < self.vocab_size for chain in chains for token in chain):
            raise BadProposal(f"drafted {chains}, with a token outside the vocabulary of {self.vocab_size}")
        if proposal.parents is not None:
            checked = check_tree(proposal, lengths)
            if isinstance(checked, str):
                raise BadProposal(f"drafted {checked}")
            tree, sound = checked
            sound = [fine and all(row[1 + width :]) for fine, row in zip(sound, told)]
            drawn = proposal.q_rows is not None
            return Drafts(chains, sound, proposal.tokens, proposal.lengths, proposal.logits, tree, sampled=drawn)
        # NaN weights end here. What was drafted before them is verified all the same: to drop a token for what came of it later
        # would be to choose among the draws (law 4). What lies beyond a row's length may be anything.
        usable = [leading(row[1 + width : 1 + width + length], length) for row, length in zip(told, lengths)]
        sound = [kept == length for kept, length in zip(usable, lengths)]
        chains = [chain[:kept] for chain, kept in zip(chains, usable)]
        used = proposal.lengths if all(sound) else torch.tensor(usable, device=proposal.lengths.device)
        sampled = proposal.logits is not None
        return Drafts(chains, sound, proposal.tokens, used, proposal.logits, sampled=sampled, copied=proposal.copied)

    def _massive(self, proposal: Proposal) -> torch.Tensor | None:
        """[B, K], whether each token has mass in the law it was drawn from: one that gives none to its own draw is no law."""
        if proposal.sound is not None or proposal.logits is None or proposal.parents is not None:
            return proposal.sound
        tokens = proposal.tokens.clamp(0, proposal.logits.shape[2] - 1)
        return torch.isfinite(proposal.logits.gather(2, tokens[:, :, None])[:, :, 0])

    def _failed(self, cause: str, error: object) -> None:
        self._failures += 1
        self.stats.fallbacks[cause] += 1
        self._pause = min(2 ** (self._failures - 1), LONGEST_PAUSE) - 1
        if self._pause < LONGEST_PAUSE - 1 or self._failures % 16 == 0:
            log.warning("drafter failed (%s: %s); no speculation for the next %d rounds", cause, error, self._pause + 1)


def leading(flags: Sequence[int], length: int) -> int:
    """How many of the first `length` are set before one that is not; all where nothing is told."""
    return next((index for index, flag in enumerate(flags) if not flag), length)


def keep_taps(request: Request, taps: torch.Tensor, begin: int, count: int) -> None:
    """The request's share `taps[begin : begin + count]` of a round, until its drafter has consumed it."""
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
