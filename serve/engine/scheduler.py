"""Choice of the next round's rows and of their numbers of tokens. Torch-free."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from draftsmith.errors import UserError
from draftsmith.serve.cache.blocks import BlockManager
from draftsmith.serve.cache.prefix import PrefixCache
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import Control, RoundPlan, RowBudget, rest_plan
from draftsmith.serve.requests.fair_queue import FairQueue
from draftsmith.serve.requests.request import Request

if TYPE_CHECKING:
    from draftsmith.serve.stats import EngineStats

PREFILL_TOKENS_PER_DECODE = 8  # prefill tokens that cost about as much as one decoded token
_CLASS = attrgetter("options.acceptance_class")


class QueueFull(UserError):
    """The server holds as many waiting requests as it may; the client should come back later."""


class Scheduler:
    """Classes of requests take turns. Admission needs a batch slot and blocks for the whole prompt;
    decoding rows always run, prompts are fed in pieces within `max_round_tokens`; when blocks run
    out the latest arrival is put back to wait and recomputed later.

    Args:
        draft_positions: tokens up to which the draft may draft; a longer request goes on without.
    """

    def __init__(
        self,
        blocks: BlockManager,
        config: EngineConfig,
        *,
        prefix: PrefixCache | None = None,
        control: Control | None = None,
        draft_positions: int | None = None,
    ):
        self.blocks, self.config, self.prefix = blocks, config, prefix
        self.control = control or Control()
        self.draft_positions = draft_positions
        self.waiting = FairQueue()
        self.running: list[Request] = []  # in order of arrival
        self.num_preemptions = 0
        self._slots = list(reversed(range(config.max_batch)))
        self._blocked: Request | None = None  # found no room, and none was given back since

    def add(self, request: Request) -> None:
        if len(self.waiting) >= self.config.max_queue:
            raise QueueFull(f"{len(self.waiting)} requests are waiting already; try again later")
        self._end_drafts([request])
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a finished or cancelled request out and frees what it held; safe for one that is
        not there."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    @property
    def busy(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def requests_of(self, answer: str, tenant: str = "") -> list[Request]:
        """Requests of an answer that have not ended, in order; `answer` and `tenant` as in their
        options."""
        return sorted(
            (
                request
                for request in itertools.chain(self.running, self.waiting)
                if request.id.rpartition("-")[0] == answer and request.options.tenant == tenant
            ),
            key=lambda request: int(request.id.rpartition("-")[2]),
        )

    def schedule(self) -> Schedule:
        schedule = Schedule()
        deciding = [request for request in self.running if not request.prefilling]
        reads_prompts = len(deciding) < len(self.running)
        if deciding:
            self._decode(schedule, deciding, reads_prompts)
        decode_tokens = sum([row.count + row.k for row in schedule.drafting + schedule.sampling])
        # A full decode batch must not starve prompts, so a block of prompt tokens always fits.
        budget = max(self.config.max_round_tokens - decode_tokens, self.blocks.block_size)
        if reads_prompts:
            budget = self._fill(schedule, budget)
        self._admit(schedule, budget)
        return schedule

    def after(self, schedule: Schedule) -> Schedule | None:
        """Choose the round after one whose tokens are not there yet; None where more of it than the
        ids of its rows may depend on them."""
        rows = schedule.sampling
        if (
            not len(rows) == len(schedule.rows) == len(self.running)
            or self.waiting
            or len(rows) > self.blocks.num_free  # none is preempted
            or not all(map(_decides_tokens_alone, rows))
        ):
            return None
        after = Schedule()
        for before in rows:
            row = ScheduledRow(before.request, before.begin + before.count, 1)
            row.samples = True
            self.blocks.grow(row.request.blocks, row.begin + 1)
            after.sampling.append(row)
        return after

    def note_admissions(self, rows: list[ScheduledRow], stats: EngineStats) -> None:
        """Count the prompts, and what the prefix cache had of them, of requests whose first round
        this is."""
        now_s = time.monotonic()
        for row in rows:
            request = row.request
            if request.times.admitted_s is None:
                request.times.admitted_s = now_s
                if request.k:
                    self.control.new_text()
                request.num_cached = row.begin
                stats.num_prompt_tokens += request.num_prompt
                if self.prefix is not None:
                    stats.prefix_cache_queries += request.num_tokens
                    stats.prefix_cache_hits += row.begin

    def _decode(self, schedule: Schedule, deciding: list[Request], reads_prompts: bool) -> None:
        self._end_drafts(deciding)
        schedule.plan = self._plan(deciding, self._pending(reads_prompts))
        reading = reads_prompts and any(
            request.prefilling and request.num_output > 0 for request in self.running
        )
        behind: list[Request] = []
        for request, k in zip(deciding, schedule.plan.ks, strict=True):
            if k > 0 and request.draft.lost_taps:
                behind.append(request)
                k = 0
            num_tokens = len(request.tokens)
            if schedule.preempted and request in schedule.preempted:
                continue
            if not self._reserve(request, num_tokens + k, schedule):
                continue
            begin = request.cache.begin
            row = ScheduledRow(request, begin, num_tokens - begin, k)
            (schedule.drafting if k > 0 else schedule.sampling).append(row)
        if behind and not reading:
            self._read_again(schedule, behind[0])

    def _end_drafts(self, requests: Sequence[Request]) -> None:
        """Ends the drafting of those behind whose text the draft has no positions left."""
        if self.draft_positions is None:
            return
        for request in requests:
            if len(request.tokens) >= self.draft_positions:
                request.k = 0
                request.draft.taps.clear()

    def _read_again(self, schedule: Schedule, request: Request) -> None:
        """Preempt a request that is to draft, but has lost its taps, so that it is admitted again
        at once; one at a time, for it pauses."""
        # As `_find_room` will count; a request that runs does not give up its place for the sake of
        # speed.
        if schedule.preempted or len(self.running) > self.blocks.num_free:
            return
        schedule.sampling = [row for row in schedule.sampling if row.request is not request]
        self.preempt(request)

    def _plan(self, deciding: list[Request], pending: int) -> RoundPlan:
        budget = max(self.config.max_round_tokens - len(deciding), self.blocks.block_size)
        num_tokens = len(deciding) + min(pending, budget)
        classes = set(map(_CLASS, deciding))
        if self.control.rests(classes, len(deciding), num_tokens):
            return rest_plan(len(deciding))
        # The bonus token comes on top of the drafted ones, so the last token is never worth
        # drafting.
        budgets = [
            RowBudget(
                request.options.acceptance_class, self._most_drafted(request) if request.k else 0
            )
            for request in deciding
        ]
        return self.control.choose(budgets, num_tokens)

    def _most_drafted(self, request: Request) -> int:
        remaining = request.remaining
        # A token that is read costs a fraction of one that is written, but there must be enough to
        # write to win it back.
        if request.draft.lost_taps and PREFILL_TOKENS_PER_DECODE * remaining < request.num_tokens:
            return 0
        most = min(request.k, remaining - 1)
        if self.draft_positions is None:
            return most
        return max(0, min(most, self.draft_positions - len(request.tokens)))

    def _pending(self, reads_prompts: bool) -> int:
        """Prompt tokens that could be fed: k is chosen before it is known what is, because drafts
        take blocks first."""
        pending = 0
        if reads_prompts:
            pending = sum(
                [_end(one) - one.cache.computed for one in self.running if one.prefilling]
            )
        if self.waiting and self._slots and self.waiting.head() is not self._blocked:
            head = self.waiting.head()
            pending += _end(head) - (0 if self.prefix is None else self.prefix.num_found(head))
        return pending

    def _reserve(self, request: Request, num_tokens: int, schedule: Schedule) -> bool:
        """Blocks for `num_tokens`, taken from later arrivals if need be; False when it had to make
        room itself."""
        if num_tokens <= len(request.blocks) * self.blocks.block_size:
            return True
        while not self.blocks.grow(request.blocks, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            schedule.preempted.append(victim)
            if victim is request:
                return False
        return True

    def preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self._release(victim)
        victim.forget_caches()
        victim.num_preemptions += 1
        self.num_preemptions += 1
        # Victims leave from the latest arrival on, so those put back stay in order of arrival.
        self.waiting.put_back(victim)

    def _release(self, request: Request) -> None:
        self.blocks.release(request.blocks)
        self._slots.append(request.slot)
        request.slot = -1
        self._blocked = None

    def _fill(self, schedule: Schedule, budget: int) -> int:
        for request in self.running:
            if request.prefilling and budget > 0:
                budget -= self._piece(schedule, request, budget)
        return budget

    def _piece(self, schedule: Schedule, request: Request, budget: int) -> int:
        again = request.cache.computed - request.cache.begin
        count = min(budget + again, _end(request) - request.cache.begin)
        row = ScheduledRow(request, request.cache.begin, count)
        (schedule.sampling if row.samples else schedule.filling).append(row)
        return count - again

    def _admit(self, schedule: Schedule, budget: int) -> None:
        while self.waiting and budget > 0 and self._slots and not schedule.preempted:
            request = self.waiting.head()
            if not self._find_room(request):
                self._blocked = request
                return
            self.waiting.pop()
            request.slot = self._slots.pop()
            self.running.append(request)
            budget -= self._piece(schedule, request, budget)

    def _find_room(self, request: Request) -> bool:
        """Blocks for the whole known text, cached ones first; False leaves the request
        without any."""
        if self.prefix is not None:
            self.prefix.attach(request)
        # The last token is never read.
        length = request.num_tokens + (request.remaining > 1)
        needed = self.blocks.blocks_for(length) - len(request.blocks)
        # One spare block for each running request keeps a newcomer from being preempted at once.
        crowded = bool(self.running) and needed + len(self.running) > self.blocks.num_free
        if crowded or not self.blocks.grow(request.blocks, length):
            self.blocks.release(request.blocks)
            request.forget_caches()
            return False
        return True


def _end(request: Request) -> int:
    """Up to where a prompt is fed. A preempted request refills up to its newest token alone, which
    an ordinary round then takes. Were its successor decided while it is fed, without drafts, the
    rounds after would begin elsewhere and a seeded request would go on with other tokens.
    """
    return request.num_tokens if request.num_output == 0 else request.num_tokens - 1


def _decides_tokens_alone(row: ScheduledRow) -> bool:
    """True where no more than tokens is asked for, of which the row's next is not the last."""
    request, params = row.request, row.request.params
    asked = params.logprobs is not None or params.prompt_logprobs is not None
    return request.k == 0 and request.remaining > 1 and not asked


@dataclass(slots=True, init=False)
class ScheduledRow:
    """One request's share of a target pass: `count` known tokens from position `begin`, then `k`
    drafted ones; and of its result, once that is read (`Round.read_rows`)."""

    request: Request
    begin: int
    count: int
    k: int
    # True when the pass reaches the newest token, so that its successor can be decided.
    samples: bool
    place: int = field(compare=False, repr=False)  # among the rows
    size: int = field(compare=False, repr=False)  # drafted tokens that the pass had of it
    drafted: list[int] = field(compare=False, repr=False)  # those that were usable
    # accepted tokens and the token after them; empty for a piece of a prompt
    emitted: list[int] = field(compare=False, repr=False)
    logits: slice = field(compare=False, repr=False)  # its own; none for a piece of a prompt
    prompt_logits: slice = field(compare=False, repr=False)  # after its `prompt_positions`

    def __init__(self, request: Request, begin: int, count: int, k: int = 0):
        self.request, self.begin, self.count, self.k = request, begin, count, k
        self.samples = begin + count == len(request.tokens)

    @property
    def accepted(self) -> int:
        return max(len(self.emitted) - 1, 0)


@dataclass(slots=True)
class Schedule:
    """Rows in the order of the pass: those that draft, those that only sample, prompt pieces that
    do neither."""

    drafting: list[ScheduledRow] = field(default_factory=list)
    sampling: list[ScheduledRow] = field(default_factory=list)
    filling: list[ScheduledRow] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    plan: RoundPlan | None = None  # of the rows that were decoding

    @property
    def rows(self) -> list[ScheduledRow]:
        return self.drafting + self.sampling + self.filling

    @property
    def num_deciding(self) -> int:
        return len(self.drafting) + len(self.sampling)
