"""The round loop: schedule, propose, one target pass, verify, commit, observe. Not thread-safe;
`loop.py` gives it a thread, `build.py` makes it."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.cuda_graphs import CountedCapturer
from draftsmith.kernels.dispatch import Reading, Upload, reads_freely
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import MAX_K
from draftsmith.serve.engine.commit import Committer, round_result
from draftsmith.serve.engine.live_draft import LiveDraft
from draftsmith.serve.engine.propose import Proposer, tokens_to_read
from draftsmith.serve.engine.recorder import RoundRecorder
from draftsmith.serve.engine.round import Round, RowSampling, reads_alone
from draftsmith.serve.engine.runner import BlockTables, TargetRunner
from draftsmith.serve.engine.scheduler import Schedule, Scheduler
from draftsmith.serve.engine.verify import Rule, adjusted, adjusted_rows, move_kept, read, settle
from draftsmith.serve.requests.input_processor import InputProcessor
from draftsmith.serve.requests.kept_taps import wants_taps
from draftsmith.serve.requests.request import (
    DEFAULT_OPTIONS,
    Completion,
    FinishReason,
    OnUpdate,
    Request,
    RequestOptions,
    Update,
)
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.stats import EngineStats


@dataclass(eq=False, kw_only=True)
class EngineCore:
    """A target, at most one drafter, and the requests between them."""

    target: Target
    config: EngineConfig
    max_length: int  # most tokens of prompt and answer together
    stats: EngineStats
    inputs: InputProcessor
    scheduler: Scheduler
    tables: BlockTables
    draft: LiveDraft
    proposer: Proposer
    runner: TargetRunner
    rule: Rule
    recorder: RoundRecorder
    adapters: list[str]  # names of the target's LoRA adapters
    committer: Committer
    draft_graphs: CountedCapturer | None = None  # what captures the draft's steps
    # launched already, its rows' newest tokens still on the device when it was
    _ahead: Round | None = field(default=None, init=False, repr=False)
    # Entered every round, as making one takes five calls.
    _without_grad: AbstractContextManager[Any] = field(
        default_factory=torch.inference_mode, init=False, repr=False
    )

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_update: OnUpdate | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> Request:
        """Queue a request; `on_update` is called after every round that gave it tokens."""
        request = self.inputs.request(prompt_ids, params, on_update, options)
        self._enqueue(request)
        return request

    def _enqueue(self, request: Request) -> None:
        self.scheduler.add(request)
        self.recorder.begin(request)

    def cancel(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        self.committer.cancel(request, reason)

    def check_k(self, request: Request, k: int) -> None:
        """Refuse a k that the request cannot have. Reads only constants, so any thread may call
        it."""
        if not 0 <= k <= MAX_K:
            raise UserError(f"k is {k}; give at least 0 and at most {MAX_K}")
        if k > 0 and self.drafter is None:
            raise UserError(f"k is {k} but there is no drafter; give 0")

    def set_k(self, request: Request, k: int) -> None:
        """Change the draft length of a request from its next round on; 0 stops drafting."""
        self.check_k(request, k)
        is_behind = (
            bool(self.proposer.taps)
            and request.k == 0
            and request.draft.cached < request.cache.computed
        )
        if k > 0 and is_behind and request in self.scheduler.running:
            # Taps were not kept while k was 0: the text is read again, after which the draft can
            # follow.
            self.scheduler.preempt(request)
        if k == 0:
            request.draft.taps.clear()
        request.k = k

    @property
    def drafter(self) -> ServingDrafter | None:
        return self.draft.drafter

    @property
    def drafts(self) -> str:
        """Phrase that says what drafts."""
        k = "auto" if self.config.adaptive else self.config.k
        return "no draft" if self.drafter is None else f"{self.drafter.family} draft, k={k}"

    @property
    def max_draft_depth(self) -> int:
        """Most drafted tokens that a round may keep, unless a request asks for more; 0 without a
        drafter."""
        if self.drafter is None:
            return 0
        return self.config.k if self.proposer.tree is None else self.proposer.tree.depth

    @property
    def max_draft_tokens(self) -> int:
        """Most drafted tokens that a round offers, unless a request asks for more: the nodes of a
        tree."""
        return 0 if self.drafter is None else self.inputs.k

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or bool(self.draft.swaps)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, text: bool = True
    ) -> list[Completion]:
        """Answer all prompts and return when they are done."""
        requests = [
            self.inputs.request(prompt, params, options=RequestOptions(text=text))
            for prompt in prompts
        ]
        for _ in self.complete(requests):
            pass
        return [Completion.of(request) for request in requests]

    def complete(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Answer all requests and give each when it ends. A request is taken from the iterable when
        the queue has room for it; its `on_update` is replaced."""
        arrivals = iter(requests)
        ended: deque[Request] = deque()

        def note(request: Request, update: Update) -> None:
            if update.finish_reason is not None:
                ended.append(request)

        while True:
            room = self.config.max_queue - len(self.scheduler.waiting)
            for request in itertools.islice(arrivals, room):
                request.on_update = note
                self._enqueue(request)
            if not self.scheduler.busy:
                return
            self.step()
            while ended:
                yield ended.popleft()

    def step(self) -> bool:
        """Run one round for every request that can take part; False when there is none. On a GPU
        the round after is launched before this one's tokens are read, where it needs them there
        alone: an end is noticed a round late, and what that round made of the request is left."""
        with self._without_grad:
            round, self._ahead = self._ahead or self._launched(), None
            if round is None:
                return False
            self._ahead = self._launched_after(round)
            if self.committer.overlaps:
                with self.stats.phases["host"]:
                    self.committer.flush()  # of the round before, while the device works
            self._verify(round)
            self._commit(round)
            self._observe(round)
            if not self.scheduler.running:
                self._ahead = None
            return True

    def _launched(self) -> Round | None:
        """The next round; None when no request can take part."""
        if self.draft.apply_swaps():
            self.scheduler.control.new_draft()
        begun_s = time.perf_counter()
        with self.stats.phases["host"]:
            schedule = self.scheduler.schedule()
            if not schedule.rows:
                self.committer.emit()
                return None
            self.scheduler.note_admissions(schedule.rows, self.stats)
        round = self._round(schedule, begun_s)
        self._propose(round)
        self._run(round)
        self._judge(round)
        return round

    def _launched_after(self, round: Round) -> Round | None:
        """The round after one that drafts nothing and of which the host has only tokens to read."""
        if (
            not self.committer.overlaps
            or round.verdict is None
            or round.sampling.adjust is not None
            or self.runner.states is not None
            or self.draft.swaps
        ):
            return None
        schedule = self.scheduler.after(round.schedule)
        if schedule is None:
            return None
        round.arriving = Reading(round.verdict)
        after = self._round(schedule, time.perf_counter())
        after.is_ahead = True
        # -1 where logits are not finite, which ends the request.
        self._run(after, newest=round.verdict[:, 1:2].clamp(min=0))
        self._judge(after)
        return after

    def _round(self, schedule: Schedule, begun_s: float) -> Round:
        """A round, whose numbers are on their way to its device."""
        with self.stats.phases["host"]:
            rows = schedule.rows
            sampling = RowSampling(schedule.drafting + schedule.sampling, self.tables.device)
            tables = self.tables.of([row.request for row in rows])
            upload = Upload(sampling.device)
            if not reads_freely(sampling.device):
                # What drafting and the target pass will ask for, each group at once.
                groups = (tokens_to_read(schedule.drafting),), self.runner.expected(rows, tables)
                num_drafting = len(schedule.drafting)
                tables, upload = sampling.send(tables, *groups, num_drafting=num_drafting)
            num_catch_up = 0
            for row in schedule.drafting:
                num_catch_up += len(row.request.tokens) - row.request.draft.cached
            return Round(schedule, rows, tables, sampling, num_catch_up, begun_s, upload)

    def _propose(self, round: Round) -> None:
        if round.schedule.drafting:
            with self.stats.phases["draft"]:
                round.proposal = self.proposer.propose(round)
        if round.sampling.adjust is not None:
            with self.stats.phases["sample"]:
                round.adjusted = adjusted_rows(
                    round.proposal, round.sampling, round.sampling.adjust
                )

    def _run(self, round: Round, newest: torch.Tensor | None = None) -> None:
        with self.stats.phases["verify"]:
            taps = self._taps(round)
            round.output = self.runner.run(
                round.rows, round.proposal, round.tables, taps, round.upload, newest
            )

    def _taps(self, round: Round) -> tuple[int, ...]:
        """Taps that the pass has to join; none where its rows may join them."""
        taps = self.proposer.taps
        if not taps or not any(map(wants_taps, [row.request for row in round.rows])):
            return ()
        if (
            round.proposal is None
            and reads_alone(round.rows)
            and self.runner.gives_states(round.rows)
        ):
            round.joins_taps = True
            return ()
        return taps

    def _judge(self, round: Round) -> None:
        if round.schedule.num_deciding:
            with self.stats.phases["sample"]:
                proposal, sampling = round.proposal, round.sampling
                logits = adjusted(round.output.logits, round.adjusted, sampling)
                round.verdict = self.rule(logits, proposal, sampling)

    def _verify(self, round: Round) -> None:
        if round.verdict is None:
            return
        with self.stats.phases["sample"]:
            proposal, arriving = round.proposal, round.arriving
            verdict = round.verdict if arriving is None else arriving.wait()
            round.emitted, round.paths, report = read(verdict, proposal)
            if proposal is not None:
                round.drafted = self.proposer.read(proposal, report, round.schedule.drafting)

    def _commit(self, round: Round) -> None:
        with self.stats.phases["host"]:
            records = False
            if round.drafted.parents is not None:
                self.stats.num_tree_nodes += sum(map(len, round.drafted.chains))
                move_kept(self.runner.pool, round.tables, round.rows, round.paths)
                drafting = [row.request for row in round.schedule.drafting]
                records = any(map(self.recorder.records, drafting))
            settle(round, with_distributions=records)
            self.committer.commit(round)

    def _observe(self, round: Round) -> None:
        """Give the controls the cost and the acceptance of the round."""
        if round.schedule.num_deciding:
            self.stats.rounds_by_k[round.planned_k] += 1
            plan = round.schedule.plan
            rests = plan is not None and plan.at_rest  # it chose nothing, and is to learn nothing
            if self.scheduler.control.learns and not rests and round.as_planned:
                accepted = round.counted_acceptance()
                seconds = time.perf_counter() - round.begun_s
                self.scheduler.control.observe(round_result(round, accepted, seconds))
        self.stats.num_rounds += 1
