"""The round loop: schedule, propose, one target pass, verify, commit. Not thread-safe; `loop.py`
gives it a thread."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from draftsmith.drafters.compiled.recorded import record_forwards
from draftsmith.drafters.interface import Recordable, ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.record import Sink
from draftsmith.serve.audit.misreport import Misreport
from draftsmith.serve.cache.blocks import BlockManager
from draftsmith.serve.cache.memory import most_unread, plan_blocks
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import Offer, RoundResult
from draftsmith.serve.control.draft_temperature import DraftDistribution
from draftsmith.serve.drafts.lineup import Lineup
from draftsmith.serve.drafts.swap import Swap
from draftsmith.serve.engine.build import control_of, prefix_cache
from draftsmith.serve.engine.graphs import can_capture, capture_drafts
from draftsmith.serve.engine.output import (
    Emission,
    Outcome,
    add_prompt_logprobs,
    complaint,
    outcome,
    token_logprobs,
)
from draftsmith.serve.engine.propose import Drafting, keep_taps
from draftsmith.serve.engine.recorder import Recorder, RoundDistributions
from draftsmith.serve.engine.round import Decision, Drafts, PassOutput
from draftsmith.serve.engine.runner import BlockTables, make_runner, prompt_positions
from draftsmith.serve.engine.scheduler import Row, Schedule, Scheduler
from draftsmith.serve.engine.trees import move_kept, straighten, wanted_tree
from draftsmith.serve.engine.verify import Streams, chain_rule, decide
from draftsmith.serve.requests.intake import Intake
from draftsmith.serve.requests.request import Completion, FinishReason, OnUpdate, Request
from draftsmith.serve.requests.route import LIVE
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.sampling.request_errors import is_own
from draftsmith.serve.stats import EngineStats

log = logging.getLogger(__name__)


class _Share(NamedTuple):
    """What a round made of one row."""

    row: Row
    index: int
    chain: list[int]  # drafted tokens
    emitted: list[int]  # accepted drafts and the token after them; empty for a piece of a prompt
    logits: torch.Tensor  # [len(chain) + 1, V] raw; [0, V] for a piece of a prompt
    prompt_logits: torch.Tensor  # [n, V], behind the row's `prompt_positions`
    drafts: Drafts | None
    distributions: RoundDistributions | None


class Engine:
    """A target, at most one drafter (further drafts of its kind may come beside it) and the
    requests between them."""

    def __init__(
        self,
        target: Target,
        drafter: ServingDrafter | None,
        config: EngineConfig,
        *,
        sink: Sink | None = None,
        draft_version: str = "",
        fallback: ServingDrafter | None = None,
    ):
        plan = plan_blocks(target, drafter, config)
        self.target, self.drafter, self.config, self.max_length = (
            target,
            drafter,
            config,
            plan.max_length,
        )
        if config.compile == "auto":
            record_forwards(target, drafter)
        self.stats = EngineStats(draft_versions={} if drafter is None else {LIVE: draft_version})
        blocks = BlockManager(plan.num_blocks, config.block_size)
        self.prefix = prefix_cache(target, drafter, blocks, plan) if config.prefix_cache else None
        self.scheduler = Scheduler(
            blocks,
            max_batch=config.max_batch,
            max_round_tokens=config.max_round_tokens,
            max_queue=config.max_queue,
            prefix=self.prefix,
            control=control_of(config),
        )
        self._max_blocks = max_blocks = blocks.blocks_for(plan.max_length) + 1
        self.runner = make_runner(
            target,
            target.new_pool(plan.num_blocks, config.block_size),
            max_batch=config.max_batch,
            max_blocks=max_blocks,
            compile=config.compile,
        )
        pool = None
        if drafter is not None:
            pool = drafter.new_pool(plan.num_blocks, config.block_size, target.device, target.dtype)
        # Tokens of an answer whose taps are kept for a draft that does not come.
        self.most_unread = 0 if drafter is None else most_unread(target, drafter, plan, config)
        tree = wanted_tree(config)
        misreport = (
            None if config.test_misreport is None else Misreport.parse(config.test_misreport)
        )
        self.drafting = Drafting(
            drafter,
            pool,
            self.stats,
            vocab_size=target.vocab_size,
            tree=tree,
            fallback=fallback,
            misreport=misreport,
        )
        self._capture(drafter)
        self.lineup = Lineup(self.drafting, self.stats, target, self._make_ready)
        self._rule = chain_rule(config.verification, config.synthetic_acceptance)
        self.draft_distribution = DraftDistribution(
            greedy=config.draft_sampling == "greedy", tune=config.tune_draft_temperature
        )
        self.recorder = Recorder(sink, target=target.name, target_revision=target.revision)
        self.emission = Emission(self.recorder)
        self.overlaps = target.device.type == "cuda"  # a pass runs on while the host goes on
        k = config.k if tree is None else tree.nodes
        self.intake = Intake(
            target,
            k=k,
            has_drafter=drafter is not None,
            max_length=plan.max_length,
            seed=config.seed,
        )
        self._tables = BlockTables(config.max_batch, max_blocks, target.device)
        # Hears each request's share of a round: its drafts, how many were accepted, what was
        # committed.
        self.onlooker: Callable[[Request, list[int], int, list[int]], None] | None = None

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_update: OnUpdate | None = None,
        *,
        text: bool = True,
        request_class: str = "",
        tenant: str = "",
        learn: bool = True,
    ) -> Request:
        """Queues a request; `on_update` is called after every round that gave it something."""
        request = self.intake.request(
            prompt_ids,
            params,
            on_update,
            text=text,
            request_class=request_class,
            tenant=tenant,
            learn=learn,
        )
        self._receive(request)
        return request

    def _receive(self, request: Request) -> None:
        """Its draft is known before its place: it looks for blocks that this draft has read."""
        self.scheduler.add(request)
        self.lineup.route(request)

    def cancel(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        if not request.finished:
            self._emit()
        if not request.finished:
            self._finish(request, reason)
            self.emission.add(request, Outcome([], reason), [])
            self._emit()

    def set_k(self, request: Request, k: int) -> None:
        """Another draft length for a request from its next round on; 0 stops drafting it."""
        if k > 0 and self.drafter is None:
            raise UserError(f"k is {k} but there is no drafter; give 0")
        unread = (
            bool(self.drafting.taps) and request.k == 0 and request.draft_cached < request.computed
        )
        if k > 0 and unread and request in self.scheduler.running:
            # Taps were not kept while nobody wanted them: its text is read again, after which the
            # draft can follow.
            self.scheduler.preempt(request)
        if k == 0:
            request.taps.clear()
        request.k = k

    def swap(self, folder: str, version: str, *, draft: str = LIVE) -> Swap:
        """Loads and checks draft weights here and now, to be taken in by the engine before its next
        round: over those of the draft of that name, or as a further draft beside the live one.

        May be called from another thread than the engine's. A draft that does not fit raises
        `UserError`; the old one stays.
        """
        return self.lineup.prepare(folder, version, draft)

    def retire(self, draft: str) -> None:
        """No request is given to it any more; it goes when its last one has ended."""
        self.lineup.retire(draft, self._requests())

    def _requests(self) -> Iterator[Request]:
        return itertools.chain(self.scheduler.running, self.scheduler.waiting)

    def _make_ready(self, drafter: ServingDrafter) -> None:
        """On any thread: nothing is captured before a round has need of it."""
        if self.config.compile == "auto" and isinstance(drafter, Recordable):
            drafter.record()
        self._capture(drafter)

    def _capture(self, drafter: ServingDrafter | None) -> None:
        if self.config.compile == "auto" and can_capture(self.target):
            capture_drafts(
                drafter,
                self.drafting.pool,
                max_batch=self.config.max_batch,
                max_blocks=self._max_blocks,
            )

    @property
    def max_draft_depth(self) -> int:
        """The most draft tokens that a round may keep, unless a request asks for more; 0 without a
        drafter."""
        if self.drafter is None:
            return 0
        return self.config.k if self.drafting.tree is None else self.drafting.tree.depth

    @property
    def max_draft_tokens(self) -> int:
        """The most draft tokens that a round offers, unless a request asks for more: the nodes of a
        tree."""
        return 0 if self.drafter is None else self.intake.k

    @property
    def lossless(self) -> bool:
        """Whether answers have the target's distribution: typical or synthetic acceptance changes
        it, and a q made wrong for tests."""
        keeps_distribution = (
            self.config.verification != "typical" and self.config.synthetic_acceptance is None
        )
        keeps_distribution = keeps_distribution and self.config.test_misreport is None
        return keeps_distribution or self.drafter is None

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or bool(self.lineup.swaps)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, text: bool = True
    ) -> list[Completion]:
        """Answers all prompts and returns when they are done."""
        requests = [self.intake.request(prompt, params, text=text) for prompt in prompts]
        arrivals = list(reversed(requests))
        while arrivals or self.scheduler.busy:
            while arrivals and len(self.scheduler.waiting) < self.config.max_queue:
                self._receive(arrivals.pop())
            self.step()
        return [completion(request) for request in requests]

    @torch.inference_mode()
    def step(self) -> bool:
        """One round for every request that can take part; False when there was nothing to do."""
        if self.lineup.take_in():
            self.scheduler.control.new_draft()
            self.draft_distribution.new_draft()
        begun_s = time.perf_counter()
        with self.stats.phase("host"):
            schedule = self.scheduler.schedule()
            rows = schedule.rows
            if not rows:
                self._emit()
                return False
            self._note_admissions(rows)
            reading = sum(
                row.request.num_tokens - row.request.draft_cached for row in schedule.drafting
            )
            tables = self._tables.of([row.request for row in rows])
            deciding = schedule.drafting + schedule.sampling
            streams = Streams(deciding, self._tables.device, rule=self._rule)
        drafts = self._propose(schedule, tables, streams)
        chains: list[list[int]] = [[] for _ in rows]
        if drafts is not None:
            chains[: len(drafts.chains)] = drafts.chains
        with self.stats.phase("verify"):
            taps = self.drafting.taps if any(row.request.k > 0 for row in rows) else ()
            output = self.runner.run(
                rows, chains, tables, taps, None if drafts is None else drafts.tree
            )
        if self.overlaps:
            with self.stats.phase("host"):
                self.emission.flush()  # of the round before, while the device works
        decision = Decision([], [])
        if schedule.num_deciding:
            with self.stats.phase("sample"):
                decision = decide(output.logits, chains[: schedule.num_deciding], drafts, streams)
        with self.stats.phase("host"):
            if drafts is not None and drafts.tree is not None:
                self.stats.num_tree_nodes += sum(map(len, drafts.chains))
                move_kept(self.runner.pool, tables, rows, decision.paths)
                with_distributions = any(
                    self.recorder.wants(row.request) for row in schedule.drafting
                )
                chains, drafts, output = straighten(
                    rows,
                    chains,
                    drafts,
                    output,
                    decision.paths,
                    with_distributions=with_distributions,
                )
            self._commit(schedule, chains, drafts, output, decision.emitted)
        as_planned = not schedule.drafting if drafts is None else drafts.as_planned
        if schedule.num_deciding:
            self.stats.rounds_by_k[max((row.k for row in schedule.drafting), default=0)] += 1
        if schedule.num_deciding and as_planned:
            self._observe(
                schedule, chains, drafts, decision.emitted, reading, time.perf_counter() - begun_s
            )
        self.stats.num_rounds += 1
        return True

    def _propose(self, schedule: Schedule, tables: torch.Tensor, streams: Streams) -> Drafts | None:
        rows, least = (
            schedule.drafting,
            0.0 if schedule.plan is None else schedule.plan.least_survival,
        )
        if not rows:
            return None
        with self.stats.phase("draft"):
            count = len(rows)
            params = streams.params[:count]
            own = (
                None
                if self.draft_distribution.plain(params)
                else self.draft_distribution.temperatures(params)
            )
            distributions, seeds = (
                streams.draft_distributions(count, own),
                streams.draft_seeds(count),
            )
            return self.drafting.propose(
                rows,
                tables[:count],
                distributions,
                seeds,
                adjust=streams.adjust,
                least_survival=least,
            )

    def _commit(
        self,
        schedule: Schedule,
        chains: list[list[int]],
        drafts: Drafts | None,
        output: PassOutput,
        emitted: list[list[int]],
    ) -> None:
        now_s = time.monotonic()
        distributions = self._round_distributions(schedule.drafting, drafts, output)
        begin = prompt_begin = 0
        for index, row in enumerate(schedule.rows):
            end = begin + (len(chains[index]) + 1 if row.samples else 0)
            prompt_end = prompt_begin + len(prompt_positions(row))
            logits, prompt_logits = (
                output.logits[begin:end],
                output.prompt_logits[prompt_begin:prompt_end],
            )
            begin, prompt_begin = end, prompt_end
            tokens = emitted[index] if row.samples else []
            try:
                share = _Share(
                    row, index, chains[index], tokens, logits, prompt_logits, drafts, distributions
                )
                self._commit_row(share, output, now_s)
            except Exception as error:
                self._fail(row.request, error)
        if self.overlaps and self.scheduler.busy:
            self._end_failed()
        else:
            self._emit()

    def _commit_row(self, share: _Share, output: PassOutput, now_s: float) -> None:
        row, chain, logits, drafts = share.row, share.chain, share.logits, share.drafts
        request, accepted = row.request, max(len(share.emitted) - 1, 0)
        add_prompt_logprobs(row, share.prompt_logits)
        self._advance(row, share.index, len(chain), accepted, drafts, output)
        if not row.samples:
            self._remember(request)
            return
        given = outcome(request, share.emitted, self.target.eos_token_ids)
        committed, reason = given.committed, given.finish_reason
        self._extend(request, committed, now_s)
        self._remember(request)
        version = self._drafted_by(request, share.index, drafts)
        self._count(request, share.index, drafts, accepted, len(committed), version)
        if self.onlooker is not None:
            self.onlooker(request, chain, accepted, committed)
        if reason is FinishReason.ERROR:
            request.error = complaint(request, sound=not bool(logits[accepted].isnan().any()))
        elif (
            share.distributions is not None
            and version is not None
            and chain
            and committed
            and self.recorder.wants(request)
        ):
            self.recorder.round(
                row,
                chain,
                accepted,
                committed,
                share.emitted[-1],
                share.distributions,
                share.index,
                version,
            )
        alternatives = request.params.logprobs
        logprobs = [] if alternatives is None else token_logprobs(logits, committed, alternatives)
        if reason is not None:
            self._finish(request, reason)
        self.emission.add(request, given, logprobs)

    def _emit(self) -> None:
        self.emission.flush()
        self._end_failed()

    def _end_failed(self) -> None:
        """Ends the requests whose text could not be made."""
        while failed := self.emission.take_failed():
            for request, error in failed:
                self._fail(request, error)
            self.emission.flush()

    def _fail(self, request: Request, error: Exception) -> None:
        """Ends one request for what only it can have met; anything else is raised again."""
        if not is_own(error):
            raise error
        log.error("request %s failed and is ended; the others go on", request.id, exc_info=error)
        self.emission.failures.failed(adjusts=request.params.adjusts)
        if request.finished:
            request.finish_reason = FinishReason.ERROR
        else:
            self._finish(request, FinishReason.ERROR)
        self.emission.add(request, Outcome([], FinishReason.ERROR), [])

    def _observe(
        self,
        schedule: Schedule,
        chains: list[list[int]],
        drafts: Drafts | None,
        emitted: list[list[int]],
        reading: int,
        seconds: float,
    ) -> None:
        """Tells the controls what the round cost and brought; `reading` is how many tokens the
        draft had yet to read.

        Of a row whose draws can be repeated only its share of the time is told: what a control
        chose by the rest would know the draws of the next request with that seed.
        """
        kept = [
            None if row.request.repeatable else len(tokens) - 1
            for row, tokens in zip(schedule.drafting, emitted)
        ]
        num_tokens = sum(row.count for row in schedule.rows)
        # What a drafter could not offer counts as not kept: the round was planned with it.
        missed = frozenset() if drafts is None else drafts.missed
        offers = [
            Offer(
                row.request.request_class, row.k, None if accepted is None else min(accepted, row.k)
            )
            for index, (row, accepted) in enumerate(zip(schedule.drafting, kept, strict=True))
            if index not in missed
        ]
        result = RoundResult(
            plan=schedule.plan,
            num_tokens=num_tokens,
            num_rows=schedule.num_deciding,
            k=max((row.k for row in schedule.drafting), default=0),
            seconds=seconds,
            num_drafted=None if None in kept else sum(map(len, chains)),
            catching_up=reading > 2 * (num_tokens + sum(row.k for row in schedule.drafting)),
            offers=offers,
        )
        self.scheduler.control.observe(result)
        if drafts is not None:
            drawn = {
                index: count
                for index, count in enumerate(kept)
                if count is not None and drafts.drawn(index)
            }
            self.draft_distribution.observe(
                [schedule.drafting[index].request.params for index in drawn], list(drawn.values())
            )

    def _advance(
        self,
        row: Row,
        index: int,
        drafted: int,
        accepted: int,
        drafts: Drafts | None,
        output: PassOutput,
    ) -> None:
        """Both caches now hold the row's known tokens and the accepted drafts."""
        request = row.request
        request.computed += row.count + accepted
        if request.k > 0 and output.taps is not None and not request.lost_taps:
            keep_taps(request, output.taps, output.begins[index], row.count + accepted)
        if drafts is not None and index < len(drafts.chains):
            self.drafting.advance(row, drafted, accepted, sound=drafts.sound[index])
        unread = request.computed - max(
            request.draft_cached, request.num_prompt, request.num_forgotten
        )
        if request.taps and unread > self.most_unread:
            # Nobody has drafted it for so long that keeping what a draft would have to read costs
            # more than it may bring.
            request.lost_taps = True
            request.taps.clear()

    def _extend(self, request: Request, committed: list[int], now_s: float) -> None:
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        request.tokens += committed
        self.stats.num_generation_tokens += len(committed)
        self.stats.num_seeded_tokens += len(committed) * request.repeatable

    def _remember(self, request: Request) -> None:
        if self.prefix is not None:
            self.prefix.store(request)

    def _drafted_by(self, request: Request, index: int, drafts: Drafts | None) -> str | None:
        """The version that drafted the row; None for text in its place and for nobody."""
        if drafts is None or not drafts.by_its_draft(index):
            return None
        return self.stats.draft_versions[request.route.draft]

    def _count(
        self,
        request: Request,
        index: int,
        drafts: Drafts | None,
        accepted: int,
        committed: int,
        version: str | None,
    ) -> None:
        offered = 0 if drafts is None else drafts.offered(index)
        request.speculation.add(offered, accepted, committed, own=version is not None)
        if offered > 0:
            self.stats.count_round(offered, accepted, committed, version=version)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.finished_s = time.monotonic()
        request.taps.clear()
        self.scheduler.remove(request)
        self.drafting.finished(request)
        self.lineup.heard(request)
        self.lineup.release(self._requests())
        self.stats.finished[reason.value] += 1
        self.stats.num_seeded_requests += request.repeatable

    def _round_distributions(
        self, rows: list[Row], drafts: Drafts | None, output: PassOutput
    ) -> RoundDistributions | None:
        # What a stand-in drafted tells nobody anything about the draft.
        if drafts is None or len(drafts.missed) == len(drafts.chains) or not any(drafts.chains):
            return None
        temperatures = [
            row.request.params.temperature if self.recorder.wants(row.request) else None
            for row in rows
        ]
        return (
            RoundDistributions(output.logits, drafts, temperatures)
            if any(t is not None for t in temperatures)
            else None
        )

    def _note_admissions(self, rows: list[Row]) -> None:
        now_s = time.monotonic()
        for row in rows:
            if row.request.admitted_s is None:
                row.request.admitted_s = now_s
                row.request.num_cached = row.begin
                self.stats.num_prompt_tokens += row.request.num_prompt
                if self.prefix is not None:
                    self.stats.prefix_cache_queries += row.request.num_tokens
                    self.stats.prefix_cache_hits += row.begin


def completion(request: Request) -> Completion:
    assert request.finish_reason is not None
    return Completion(
        prompt=request.tokens[: request.num_prompt],
        tokens=request.output,
        text=request.text,
        finish_reason=request.finish_reason,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        speculation=request.speculation,
    )
