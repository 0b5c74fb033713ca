"""Commit of a verified round: requests get their tokens, both caches advance, finished requests
leave, and updates go to readers."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from draftsmith.drafters.target.target import Target
from draftsmith.kernels.acceptance import bucket_of
from draftsmith.kernels.dispatch import pins
from draftsmith.serve.control.control import RoundResult, RowResult
from draftsmith.serve.engine.output import (
    Logprobs,
    StopCheck,
    add_prompt_logprobs,
    check_stop,
    error_message,
    flush_text,
    token_logprobs,
)
from draftsmith.serve.engine.propose import Proposer
from draftsmith.serve.engine.recorder import RoundRecorder
from draftsmith.serve.engine.round import Round
from draftsmith.serve.engine.runner import state_read
from draftsmith.serve.engine.scheduler import ScheduledRow, Scheduler
from draftsmith.serve.requests.kept_taps import SharedTaps, keep_taps, reads_taps
from draftsmith.serve.requests.request import FinishReason, Request, Update
from draftsmith.serve.sampling.state import LoneFailures, is_own

log = logging.getLogger(__name__)


class _Item(NamedTuple):
    """An update to be made of what a request was given."""

    request: Request
    kept: StopCheck
    logprobs: Logprobs | None = None  # of the kept tokens


class Committer:
    """Writes what a round decided into its requests, ends them, and gives updates to their readers.

    No update can change a schedule, so they may be given while the next pass runs.

    Args:
        most_kept: tokens of an answer whose taps a request keeps for a draft that does not come.
    """

    def __init__(
        self,
        target: Target,
        scheduler: Scheduler,
        proposer: Proposer,
        recorder: RoundRecorder,
        *,
        most_kept: int,
    ):
        self.scheduler, self.proposer = scheduler, proposer
        self.recorder, self.stats, self.failures = recorder, proposer.stats, LoneFailures()
        self.eos_token_ids, self.most_kept = target.eos_token_ids, most_kept
        self.state_layers = target.state_layers or None  # whose states are kept between rounds
        # The next pass runs while the host goes on, so that updates wait until it is launched.
        self.overlaps = pins(target.device)
        self._shared: SharedTaps | None = None  # those of the latest rounds
        self._tapped = [1 + tap for tap in proposer.taps]  # of all states of a pass
        # Of rows: tokens offered, kept and committed, version that drafted them, and tokens before.
        self._uncounted: list[tuple[Request, int, int, int, str | None, int]] = []
        self._pending: deque[_Item] = deque()
        # Requests whose text or last record could not be made; they get no update since.
        self._failed: dict[Request, Exception] = {}

    def commit(self, round: Round) -> None:
        now_s = time.monotonic()
        self._share_taps(round)
        for row in round.read_rows():
            if round.is_ahead and _left(row):
                continue
            try:
                self._commit_row(round, row, now_s)
            except Exception as error:
                self._fail(row.request, error)
        self.recorder.end_round()
        if self.overlaps and self.scheduler.busy:
            self._end_failed()
        else:
            self.emit()

    def _share_taps(self, round: Round) -> None:
        """Keep the taps of a round whose rows read a token each and drafted nothing."""
        taps, every, joins = round.output.taps, round.output.every, round.joins_taps
        alone = taps is not None and round.proposal is None and len(taps) == len(round.rows)
        requests = [row.request for row in round.rows] if joins or alone else []
        if self._shared is not None and not self._shared.are_of(requests):
            # It stays for its rows, joined.
            self._shared.passes()
            self._shared = None
        if not any(map(reads_taps, requests)):
            self._shared = None
            return
        if self._shared is None:
            self._shared = SharedTaps(requests)
        if taps is None:
            assert every is not None, "taps that rows join need the states of the pass"
            self._shared.add(list(map(every.__getitem__, self._tapped)))
        else:
            self._shared.add([taps[None]])

    def _commit_row(self, round: Round, row: ScheduledRow, now_s: float) -> None:
        request = row.request
        if request.params.prompt_logprobs is not None:
            add_prompt_logprobs(row, round.output.prompt_logits[row.prompt_logits])
        self._advance(round, row)
        if not row.samples:
            self._store_prefix(request)
            return
        kept, before = check_stop(request, row.emitted, self.eos_token_ids), len(request.tokens)
        self._extend(request, kept.committed, now_s)
        self._store_prefix(request)
        offered, version = round.drafted.offered(row.place), None
        if round.drafted.by_draft(row.place):
            version = self.stats.draft_version
        count = len(kept.committed)
        self._uncounted.append((request, offered, row.accepted, count, version, before))
        if kept.finish_reason is FinishReason.ERROR:
            finite = not bool(round.output.logits[row.logits][row.accepted].isnan().any())
            request.error = error_message(request, logits_finite=finite)
        elif (
            self.recorder.sink is not None
            and version is not None
            and row.drafted
            and kept.committed
            and self.recorder.records(request)
        ):
            self.recorder.round(row, kept.committed, round, version)
        alternatives, logprobs = request.params.logprobs, None
        if alternatives is not None:
            logprobs = token_logprobs(round.output.logits[row.logits], kept.committed, alternatives)
        if kept.finish_reason is not None:
            self._finish(request, kept.finish_reason)
        self._pending.append(_Item(request, kept, logprobs))

    def _advance(self, round: Round, row: ScheduledRow) -> None:
        """Both caches now hold the row's known tokens and the accepted ones."""
        request = row.request
        count = row.count + row.accepted
        again = request.cache.state.behind  # read a second time, their taps were kept before
        request.cache.computed = row.begin + count
        if self.state_layers is not None:
            state_read(self.state_layers, row, row.size).verified(row.accepted)
        if request.k > 0 and round.output.taps is not None:
            begin = round.output.begins[row.place] + again
            if self._shared is None:
                keep_taps(request, round.output.taps, begin, count - again)
            if request.recording.tap_log is not None:
                states = round.output.taps[begin : begin + count - again]
                self.recorder.keep_taps(request, row.begin + again, states)
        if round.drafted.is_read(row.place):
            self.proposer.advance(row, len(row.drafted), row.accepted)
        draft = request.draft
        if draft.taps:
            begin = max(draft.cached, request.num_prompt, request.cache.num_forgotten)
            if request.cache.computed - begin > self.most_kept:
                # Its draft was away for so long that keeping what it would have to read costs more
                # than it may bring.
                draft.lost_taps = True
                draft.taps.clear()

    def _extend(self, request: Request, committed: list[int], now_s: float) -> None:
        if request.times.first_token_s is None:
            request.times.first_token_s = now_s
        request.times.last_token_s = now_s
        request.tokens += committed

    def _store_prefix(self, request: Request) -> None:
        if self.scheduler.prefix is not None:
            self.scheduler.prefix.store(request)

    def _count(self) -> None:
        """Count the rows that were committed, those that are alike at once."""
        stats, alike = self.stats, Counter[tuple[int, int, int, str | None, int]]()
        for request, offered, accepted, committed, version, before in self._uncounted:
            request.speculation.add(offered, accepted, committed)
            stats.num_generation_tokens += committed
            if request.repeatable:
                stats.num_seeded_tokens += committed
            if offered > 0:
                alike[offered, accepted, committed, version, bucket_of(before)] += 1
        self._uncounted.clear()
        for (offered, accepted, committed, version, bucket), times in alike.items():
            stats.count_round(
                offered, accepted, committed, version=version, bucket=bucket, times=times
            )

    def cancel(self, request: Request, reason: FinishReason) -> None:
        """End a request; its reader gets the tokens so far and then the reason."""
        if not request.finished:
            self.emit()
        if not request.finished:
            self._finish(request, reason)
            self._pending.append(_Item(request, StopCheck([], reason)))
            self.emit()

    def flush(self) -> None:
        """Count what is committed and give updates, which can change no schedule, so that it may be
        done while the next pass runs."""
        self._count()
        while self._pending:
            item = self._pending.popleft()
            if item.request not in self._failed and (text := self._text(item)) is not None:
                self._update(item, text)

    def _update(self, item: _Item, text: str) -> None:
        """Give the reader its update."""
        request, kept, logprobs = item
        told = [] if logprobs is None else logprobs()
        if kept.finish_reason is not FinishReason.ERROR:
            self.failures.served(ended=kept.finish_reason is not None)
        request.text += text
        request.logprobs += told
        if request.on_update is not None:
            request.on_update(request, Update(kept.committed, text, told, kept.finish_reason))

    def _text(self, item: _Item) -> str | None:
        """Text of the item; None where it could not be made and the request is still to be ended
        for that."""
        request, kept, _ = item
        text = kept.text
        try:
            text += flush_text(request, kept)
            if kept.finish_reason is not None and self.recorder.records(request):
                self.recorder.finish(request)
        except Exception as error:
            if not is_own(error):
                # The caller ends running requests; a finished one would get no update again.
                if kept.finish_reason is not None and request.on_update is not None:
                    request.on_update(request, Update([], "", [], FinishReason.ERROR))
                raise
            if kept.finish_reason is not FinishReason.ERROR:
                self._failed[request] = error
                return None
            log.warning(
                "request %s, which ends with an error, could not be put away whole (%s)",
                request.id,
                error,
            )
        return text

    def emit(self) -> None:
        """Give all updates to their readers, and records to the sink."""
        self.flush()
        self.recorder.put_late()
        self._end_failed()

    def _end_failed(self) -> None:
        """End the requests whose text could not be made."""
        while self._failed:
            failed, self._failed = self._failed, {}
            # Later items of theirs would be given after a hole, or after their end.
            self._pending = deque(item for item in self._pending if item.request not in failed)
            for request, error in failed.items():
                self._fail(request, error)
            self.flush()

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request for an error that only it can have met; raise any other again."""
        if not is_own(error):
            raise error
        log.error("request %s failed and is ended; the others go on", request.id, exc_info=error)
        self.failures.failed(adjusts=request.params.adjusts)
        if request.finished:
            request.finish_reason = FinishReason.ERROR
        else:
            self._finish(request, FinishReason.ERROR)
        self._pending.append(_Item(request, StopCheck([], FinishReason.ERROR)))

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._count()  # its numbers are read below
        request.finish_reason = reason
        request.times.finished_s = time.monotonic()
        request.draft.taps.clear()
        self.scheduler.remove(request)
        if not self.scheduler.running:
            self._shared = None
        self.proposer.finished(request)
        self.stats.finished[reason.value] += 1
        self.stats.num_seeded_requests += request.repeatable


def _left(row: ScheduledRow) -> bool:
    """True where the request has ended or was preempted since its row was launched ahead."""
    return row.request.finished or row.request.cache.computed != row.begin


def round_result(round: Round, accepted: Sequence[int | None], seconds: float) -> RoundResult:
    """Time and acceptance of a round, as the control of k takes them; `accepted` by drafting row,
    None where it may not be counted."""
    drafting = round.schedule.drafting
    num_tokens = sum(row.count for row in round.rows)
    # Tokens that a drafter could not offer count as not kept: the round was planned with them.
    offers = [
        RowResult(
            row.request.options.acceptance_class,
            row.k,
            None if count is None else min(count, row.k),
            None if count is None else len(chain),
        )
        for row, count, chain in zip(drafting, accepted, round.chains)
    ]
    return RoundResult(
        plan=round.schedule.plan,
        num_tokens=num_tokens,
        num_rows=round.schedule.num_deciding,
        k=round.planned_k,
        seconds=seconds,
        catching_up=round.num_catch_up > 2 * (num_tokens + sum(row.k for row in drafting)),
        offers=offers,
        num_catch_up=round.num_catch_up,
    )
