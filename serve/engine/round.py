"""Values of one round: its rows, what was drafted, the target pass, what verification kept.

Legend: B deciding rows, of which the first draft; K drafted tokens of a row; R rows of logits;
T tokens of the target pass; V vocabulary.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from draftsmith.drafters.trees.layout import node_depths
from draftsmith.kernels.dispatch import Reading, Upload, reads_freely, sent
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.random_streams import FEW, few_round_seeds, round_seeds
from draftsmith.kernels.verify.draft_tree import DraftTree
from draftsmith.serve.engine.scheduler import Schedule, ScheduledRow
from draftsmith.serve.requests.request import Request
from draftsmith.serve.sampling.adjustments import Adjustments
from draftsmith.serve.sampling.params import DrawOptions, SamplingParams
from draftsmith.serve.sampling.state import SamplingState

# (request, drafted tokens, number accepted, committed tokens)
OnRound = Callable[[Request, list[int], int, list[int]], None]


class RowSampling:
    """Sampling parameters and random streams of every deciding row, as the tensors that drafting
    and verification share."""

    def __init__(self, rows: Sequence[ScheduledRow], device: torch.device):
        self.device, self.all_greedy = device, True
        self.params: list[SamplingParams] = []
        self.streams: list[tuple[int, int]] = []
        self._budgets: list[int] = []
        self._draft_seeds: torch.Tensor | None = None  # that are on the device already
        self._options: list[DrawOptions] = []
        states: list[SamplingState | None] = []
        texts: list[list[int]] = []
        for row in rows:
            request = row.request
            self.params.append(request.params)
            self._options.append(request.params.draw_options)
            self.all_greedy &= request.params.temperature == 0
            self.streams.append((request.seed, len(request.tokens)))
            self._budgets.append(row.k)
            states.append(request.sampling_state)
            texts.append(request.tokens)
        self.adjust = Adjustments.of(states, texts)

    @cached_property
    def seeds(self) -> torch.Tensor:
        """[B] int64 of the requests. As what follows not made for a greedy round without drafts,
        which reads none."""
        seeds = [seed for seed, _ in self.streams]
        return torch.tensor(seeds, dtype=torch.int64, device=self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[B] int64, absolute, of each row's next token."""
        positions = [position for _, position in self.streams]
        return torch.tensor(positions, dtype=torch.int64, device=self.device)

    @cached_property
    def budgets(self) -> torch.Tensor:
        """[B] int64, most tokens that each row may draft."""
        return torch.tensor(self._budgets, dtype=torch.int64, device=self.device)

    def send(
        self, tables: torch.Tensor, *groups: Sequence[Sequence[int]], num_drafting: int = 0
    ) -> tuple[torch.Tensor, Upload]:
        """Everything of the host's that a round is expected to read on its device, by one copy:
        `tables` [rows, blocks], `groups` of columns and, of a few rows that draft, their seeds: on
        the device these are thirty launches. On a CPU it is made when it is asked for."""
        seeds, positions = zip(*self.streams) if self.streams else ((), ())
        drafting = few_round_seeds(self.streams[:num_drafting]) if num_drafting <= FEW else []
        own = (tables.flatten(), seeds, positions, self._budgets, drafting)
        columns = [column for group in groups for column in group]
        flat, self.seeds, self.positions, self.budgets, self._draft_seeds, *parts = sent(
            self.device, *own, *columns
        )
        return flat.view(tables.shape), Upload(self.device, groups, parts)

    def distributions(self) -> SamplingRows:
        """Distributions of every row."""
        return _distributions(tuple(self._options), self.device)

    def repeated(self, counts: Sequence[int]) -> SamplingRows:
        """The distribution of row b `counts[b]` times."""
        pairs = zip(self._options, counts, strict=True)
        repeated = [one for one, count in pairs for _ in range(count)]
        return _distributions(tuple(repeated), self.device)

    def draft_seeds(self, num_rows: int) -> torch.Tensor:
        """[num_rows] int64 of the first rows, which draft; no two rounds of a request have the same
        one."""
        if reads_freely(self.device) and num_rows <= FEW:
            return torch.tensor(few_round_seeds(self.streams[:num_rows]), dtype=torch.int64)
        if self._draft_seeds is not None and len(self._draft_seeds) == num_rows:
            return self._draft_seeds
        return round_seeds(self.seeds[:num_rows], self.positions[:num_rows])

    def draft_distributions(
        self, num_rows: int, temperatures: Sequence[float] | None = None
    ) -> SamplingRows:
        """Distributions of the first rows, which draft; at their requests' temperatures or the
        given ones."""
        options = self._options[:num_rows]
        if temperatures is not None:
            options = [
                one._replace(temperature=temperature)
                for one, temperature in zip(options, temperatures, strict=True)
            ]
        return _distributions(tuple(options), self.device)


@lru_cache(maxsize=64)
def _distributions(options: tuple[DrawOptions, ...], device: torch.device) -> SamplingRows:
    """Made once for the rounds of the same requests; nothing writes into them."""
    temperature, top_k, top_p, min_p = zip(*options)
    return SamplingRows.of(temperature, top_k=top_k, top_p=top_p, min_p=min_p, device=device)


class DraftSource(enum.Enum):
    """Origin of a row's drafted tokens."""

    DRAFT = enum.auto()  # the draft of the row's request
    TEXT = enum.auto()  # text, in place of the trained draft behind it
    # The fallback, or nothing, because the draft rests or has failed: the row's acceptance says
    # nothing about the draft.
    NONE = enum.auto()


class UnreadDrafts(NamedTuple):
    """Chains or trees that are laid out by their budgets, of which fewer tokens may be usable."""

    report: torch.Tensor  # [B, 1 + K or more] int64, what `proposal.read_late` makes them of
    rooms: torch.Tensor  # [B] int64, tokens that each row has in the pass
    # Tokens [B, K], of trees their parents behind them, on their way to a host that works out the
    # target's distributions from them; None: it does not.
    coming: Reading | None = None
    parts: Sequence[Part] = ()  # of several drafts, each of its own rows; empty: one draft's


class Part(NamedTuple):
    """Proposal of one draft for its rows of a round."""

    rows: Sequence[int]  # of the round
    proposal: RoundProposal


@dataclass(frozen=True)
class RoundProposal:
    """Drafted tokens of the drafting rows, one entry per row in every field."""

    # usable tokens; empty where the drafter gave none or its first distribution failed
    chains: list[list[int]]
    sources: list[DraftSource]
    drawn: list[bool]  # False: tokens are deterministic, not drawn from a distribution
    # False: what the drafter did for this row is not trusted, its cache does not advance
    has_mass: list[bool]
    tokens: torch.Tensor  # [B, K] int64
    lengths: torch.Tensor  # [B] int64
    logits: torch.Tensor | None  # [B, K, V] processed; of trees [Q, V]
    tree: RoundTree | None = None  # parents of the tokens when they are no chains
    # None: the host has the tokens. Else they are on the device alone until the round's result is
    # read, and `chains` hold zeros in their place.
    unread: UnreadDrafts | None = None

    @property
    def as_planned(self) -> bool:
        """True when most rows have tokens of their own draft. One draft of several that fails must
        not keep the control of k from learning."""
        return 2 * self.sources.count(DraftSource.NONE) < len(self.chains)

    def on_its_way(self) -> RoundProposal:
        """The same, with unread tokens sent to the host while the target's pass runs."""
        if self.unread is None:
            return self
        parts = [self.tokens] if self.tree is None else [self.tokens, self.tree.draft.parents]
        coming = Reading(torch.cat(parts, dim=1))
        return replace(self, unread=self.unread._replace(coming=coming))

    def offered(self, index: int) -> int:
        """Depth of the row's drafted tokens: a round keeps at most so many of them."""
        if index >= len(self.chains):
            return 0
        return len(self.chains[index]) if self.tree is None else self.tree.height(index)

    def by_its_draft(self, index: int) -> bool:
        """True when the draft of the row's request drafted it, not text in its place."""
        return index < len(self.chains) and self.sources[index] is DraftSource.DRAFT


class RoundTree(NamedTuple):
    """Trees of the drafting rows, which come first in the pass."""

    draft: DraftTree
    q_rows: torch.Tensor | None  # [B, N + 1]
    # the same parents on the host, as many as a row has nodes; -1 in their place while unread
    parents: list[list[int]]

    def depths(self, row: int) -> list[int]:
        """Depths of the row's nodes, 0 for children of the root."""
        return node_depths(self.parents[row])

    def height(self, row: int) -> int:
        return max(self.depths(row), default=-1) + 1


class PassOutput(NamedTuple):
    logits: torch.Tensor  # [R, V] float32: a deciding row owns 1 + its drafted tokens
    taps: torch.Tensor | None  # [T, n * H]
    begins: list[int]  # first index of each row in T
    # [P, V] float32: after the positions that `prompt_positions` names, row after row
    prompt_logits: torch.Tensor
    every: Sequence[torch.Tensor] | None = None  # states of the pass, as `States` has them


class VerifyOutput(NamedTuple):
    # each row's accepted tokens, then its residual or bonus token (-1 if its logits are not finite)
    emitted: list[list[int]]
    paths: list[list[int]]  # each row's accepted nodes when trees were drafted; empty for chains
    report: list[list[int]] | None = None  # the proposal's, where its chains were unread


class RowOutput(NamedTuple):
    """Share of one row in a finished round."""

    row: ScheduledRow
    index: int  # type: ignore[assignment]  # in place of the tuple's method
    drafted: list[int]
    emitted: list[int]  # accepted tokens and the token after them; empty for a piece of a prompt
    accepted: int
    output: PassOutput
    own: slice  # of its logits
    own_prompt: slice  # of its prompt logits

    @property
    def logits(self) -> torch.Tensor:
        """[len(drafted) + 1, V] raw; [0, V] for a piece of a prompt. Few rounds need them."""
        return self.output.logits[self.own]

    @property
    def prompt_logits(self) -> torch.Tensor:
        """[n, V], after the row's `prompt_positions`."""
        return self.output.prompt_logits[self.own_prompt]


@dataclass(slots=True)
class Round:
    """One round; each phase fills in its field and reads those above it."""

    schedule: Schedule
    rows: list[ScheduledRow]  # in the order of the pass
    tables: torch.Tensor  # [rows, most blocks of any of them]
    sampling: RowSampling  # of the deciding rows
    num_unread: int  # tokens that the drafts had yet to read
    begun_s: float
    upload: Upload | None = None  # what is on the device; None on a CPU
    proposal: RoundProposal | None = None  # None: nothing was drafted
    output: PassOutput = field(init=False)
    late_taps: tuple[int, ...] = ()  # of the pass, to be joined once they are read
    verified: VerifyOutput = field(init=False)

    @property
    def tree(self) -> RoundTree | None:
        return None if self.proposal is None else self.proposal.tree

    @property
    def chains(self) -> list[list[int]]:
        """Drafted tokens of every row; empty for rows behind the drafting ones."""
        chains = [] if self.proposal is None else self.proposal.chains
        return chains + [[]] * (len(self.rows) - len(chains))

    @property
    def late_tokens(self) -> torch.Tensor | None:
        """[B, K] drafted tokens that the host does not have; None where it has them."""
        unread = self.proposal is not None and self.proposal.unread is not None
        return self.proposal.tokens if unread and self.proposal is not None else None

    @property
    def as_planned(self) -> bool:
        """True unless most of the rows that were to draft did not."""
        if self.proposal is None:
            return not self.schedule.drafting
        return self.proposal.as_planned

    @property
    def at_rest(self) -> bool:
        """True when its control chose nothing and is to learn nothing from it."""
        plan = self.schedule.plan
        return plan is not None and plan.at_rest

    @property
    def planned_k(self) -> int:
        return max([row.k for row in self.schedule.drafting]) if self.schedule.drafting else 0

    def counted_acceptance(self) -> list[int | None]:
        """Accepted tokens of each drafting row; None where the row's draws can be repeated: a
        control that depended on them would bias the next request with that seed."""
        return [
            None if row.request.repeatable else len(tokens) - 1
            for row, tokens in zip(self.schedule.drafting, self.verified.emitted)
        ]

    def row_outputs(self) -> Iterator[RowOutput]:
        begin = prompt_begin = 0
        wants_prompts = self.output.prompt_logits.shape[0] > 0
        for index, (row, drafted) in enumerate(zip(self.rows, self.chains, strict=True)):
            emitted = self.verified.emitted[index] if row.samples else []
            end = begin + (len(drafted) + 1 if row.samples else 0)
            prompt_end = prompt_begin + (len(prompt_positions(row)) if wants_prompts else 0)
            yield RowOutput(
                row,
                index,
                drafted,
                emitted,
                max(len(emitted) - 1, 0),
                self.output,
                slice(begin, end),
                slice(prompt_begin, prompt_end),
            )
            begin, prompt_begin = end, prompt_end


def reads_alone(rows: Sequence[ScheduledRow]) -> bool:
    """True when each row reads one token, whose states no record is to hold."""
    alone = [row for row in rows if row.count == 1 and row.request.recording.tap_log is None]
    return len(alone) == len(rows)


def settle(round: Round, proposal: RoundProposal | None) -> None:
    """Give a round its proposal, whose tokens were unread so far, and leave out the logits of what
    was not usable."""
    wanted: list[int] = []
    laid_out, begin = round.chains, 0
    round.proposal = proposal
    for row, places, chain in zip(round.rows, laid_out, round.chains, strict=True):
        if row.samples:
            wanted += range(begin, begin + len(chain) + 1)
            begin += len(places) + 1
    if len(wanted) < begin:
        logits = round.output.logits
        round.output = round.output._replace(logits=logits[sent(logits.device, wanted)[0]])


def prompt_positions(row: ScheduledRow) -> range:
    """Positions of the row whose logits give the logprob of a prompt token that the request asked
    for and does not have yet.

    At most `max_round_tokens` per pass, which bounds the memory that their logits take.
    """
    request = row.request
    if not request.wants_prompt_logprobs:
        return range(0)
    first = max(row.begin, len(request.prompt_logprobs))
    return range(first, min(row.begin + row.count, request.num_prompt - 1))
