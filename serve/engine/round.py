"""Values of one round: its rows, what was drafted, the target pass, what verification kept.

Legend: B deciding rows, of which the first draft; K drafted tokens of a row; R rows of logits;
T tokens of the target pass; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import Reading, Upload, sent
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.random_streams import few_round_seeds
from draftsmith.serve.control.control import draft_temperature
from draftsmith.serve.engine.proposal import NOTHING_DRAFTED, Drafted, RoundProposal
from draftsmith.serve.engine.scheduler import Schedule, ScheduledRow
from draftsmith.serve.sampling.adjustments import Adjustments
from draftsmith.serve.sampling.params import DrawOptions, SamplingParams
from draftsmith.serve.sampling.state import SamplingState


class RowSampling:
    """Sampling parameters and random streams of every deciding row, as the tensors that drafting
    and verification share."""

    def __init__(self, rows: Sequence[ScheduledRow], device: torch.device):
        self.device, self.all_greedy = device, True
        self.params: list[SamplingParams] = []
        self.streams: list[tuple[int, int]] = []
        self._budgets: list[int] = []
        self._options: list[DrawOptions] = []
        states: list[SamplingState | None] = []
        texts: list[list[int]] = []
        for row in rows:
            request = row.request
            self.params.append(request.params)
            self._options.append(request.params.draw_options)
            self.all_greedy &= request.params.temperature == 0
            self.streams.append((request.seed, row.begin + row.count))
            self._budgets.append(row.k)
            states.append(request.sampling_state)
            texts.append(request.tokens)
        self.adjust = Adjustments.of(states, texts)

    @cached_property
    def seeds(self) -> torch.Tensor:
        """[B] int64 of the requests. As what follows not made for a greedy round without drafts,
        which reads none."""
        return sent(self.device, [seed for seed, _ in self.streams])[0]

    @cached_property
    def positions(self) -> torch.Tensor:
        """[B] int64, absolute, of each row's next token."""
        return sent(self.device, [position for _, position in self.streams])[0]

    @cached_property
    def budgets(self) -> torch.Tensor:
        """[B] int64, most tokens that each row may draft."""
        return sent(self.device, self._budgets)[0]

    @cached_property
    def draft_seeds(self) -> torch.Tensor:
        """[B] int64, or of the first rows alone, which draft; no two rounds of a request have the
        same one."""
        return sent(self.device, few_round_seeds(self.streams))[0]

    def send(
        self, tables: torch.Tensor, *groups: Sequence[Sequence[int]], num_drafting: int
    ) -> tuple[torch.Tensor, Upload]:
        """Everything of the host's that a round is expected to read on its device, by one copy:
        `tables` [rows, blocks] and `groups` of columns."""
        seeds, positions = zip(*self.streams) if self.streams else ((), ())
        drafting = few_round_seeds(self.streams[:num_drafting])
        own = (tables.flatten(), seeds, positions, self._budgets, drafting)
        columns = [column for group in groups for column in group]
        flat, self.seeds, self.positions, self.budgets, self.draft_seeds, *parts = sent(
            self.device, *own, *columns
        )
        return flat.view(tables.shape), Upload(self.device, groups, parts)

    def distributions(self) -> SamplingRows:
        """Distributions of every row."""
        return _distributions(tuple(self._options), self.device)

    def repeated(self, sizes: Sequence[int]) -> SamplingRows:
        """The distribution of every row of logits: row b owns `sizes[b] + 1` of them, and those
        behind one each."""
        counts = [size + 1 for size in sizes] + [1] * (len(self._options) - len(sizes))
        pairs = zip(self._options, counts, strict=True)
        repeated = [one for one, count in pairs for _ in range(count)]
        return _distributions(tuple(repeated), self.device)

    def draft_distributions(self, num_rows: int, *, greedy: bool) -> SamplingRows:
        """Distributions of the first rows, which draft; `greedy` as for `draft_temperature`."""
        temperatures = [draft_temperature(one, greedy=greedy) for one in self.params[:num_rows]]
        pairs = zip(self._options, temperatures)
        options = [one._replace(temperature=temperature) for one, temperature in pairs]
        return _distributions(tuple(options), self.device)


@lru_cache(maxsize=64)
def _distributions(options: tuple[DrawOptions, ...], device: torch.device) -> SamplingRows:
    """Made once for the rounds of the same requests; nothing writes into them."""
    temperature, top_k, top_p, min_p = zip(*options)
    return SamplingRows.of(temperature, top_k=top_k, top_p=top_p, min_p=min_p, device=device)


class PassOutput(NamedTuple):
    logits: torch.Tensor  # [R, V] float32: a deciding row owns 1 + its drafted tokens
    taps: torch.Tensor | None  # [T, n * H]
    begins: Sequence[int]  # first index of each row in T
    # [P, V] float32: after the positions that `prompt_positions` names, row after row
    prompt_logits: torch.Tensor
    every: Sequence[torch.Tensor] | None = None  # states of the pass, as `States` has them


class AdjustedRows(NamedTuple):
    """Rows of the target's logits in a round whose requests adjust them."""

    owners: list[int]  # the deciding row of each
    rows: torch.Tensor  # [R] int64, the same on the device
    drafted: torch.Tensor  # [R, D] int64, the drafted tokens before each; -1 is none
    reading: Reading | None  # of `drafted`; None: the host needs none of them


@dataclass(slots=True)
class Round:
    """One round; each phase fills in its field and reads those above it."""

    schedule: Schedule
    rows: list[ScheduledRow]  # in the order of the pass
    tables: torch.Tensor  # [rows, most blocks of any of them]
    sampling: RowSampling  # of the deciding rows
    num_catch_up: int  # tokens that the draft had yet to read
    begun_s: float
    upload: Upload  # what is on the device already
    proposal: RoundProposal | None = None  # None: nothing was drafted
    adjusted: AdjustedRows | None = None  # None: no request adjusts its logits
    output: PassOutput = field(init=False)
    verdict: torch.Tensor | None = None  # of the rule, on the device; None: no row decides
    arriving: Reading | None = None  # the verdict, where the round after is launched before
    is_ahead: bool = False  # launched before the verdict of the round before it was read
    joins_taps: bool = False  # from the states of the pass, for those that keep them
    drafted: Drafted = NOTHING_DRAFTED  # the proposal, once the host has read it
    # of each row its accepted tokens, then its residual or bonus token (-1 if its logits are not
    # finite)
    emitted: list[list[int]] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)  # its accepted nodes where trees drafted

    @property
    def sizes(self) -> list[int]:
        """Drafted tokens that the pass has of every row; 0 of rows behind the drafting ones."""
        sizes = [] if self.proposal is None else self.proposal.sizes
        return sizes + [0] * (len(self.rows) - len(sizes))

    @property
    def chains(self) -> list[list[int]]:
        """Usable drafted tokens of every row; empty for rows behind the drafting ones."""
        return self.drafted.chains + [[]] * (len(self.rows) - len(self.drafted.chains))

    @property
    def as_planned(self) -> bool:
        """True unless the rows that were to draft did not."""
        return not self.schedule.drafting or self.proposal is not None

    @property
    def planned_k(self) -> int:
        return max([row.k for row in self.schedule.drafting]) if self.schedule.drafting else 0

    def counted_acceptance(self) -> list[int | None]:
        """Accepted tokens of each drafting row; None where the row's draws can be repeated: a
        control that depended on them would bias the next request with that seed."""
        return [
            None if row.request.repeatable else len(tokens) - 1
            for row, tokens in zip(self.schedule.drafting, self.emitted)
        ]

    def read_rows(self) -> Iterator[ScheduledRow]:
        """The rows, each with its result."""
        begin, prompts = 0, slice(0, 0)
        wants_prompts = self.output.prompt_logits.shape[0] > 0
        rows = zip(self.rows, self.sizes, self.chains, strict=True)
        for place, (row, size, drafted) in enumerate(rows):
            row.place, row.size, row.drafted = place, size, drafted
            row.emitted = self.emitted[place] if row.samples else []
            end = begin + len(drafted) + 1 if row.samples else begin
            if wants_prompts:
                prompts = slice(prompts.stop, prompts.stop + len(prompt_positions(row)))
            row.logits, row.prompt_logits = slice(begin, end), prompts
            yield row
            begin = end


def reads_alone(rows: Sequence[ScheduledRow]) -> bool:
    """True when each row reads one token, whose states no record is to hold."""
    alone = [row for row in rows if row.count == 1 and row.request.recording.tap_log is None]
    return len(alone) == len(rows)


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
