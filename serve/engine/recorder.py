"""Round records: drafted tokens with p and q at their positions, handed to the sink."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.logged import LoggedRound
from draftsmith.prompts.shares import uniform
from draftsmith.record import RecordedRound, RecordedTaps, RecordHead, RoundRow, Sink, hashed
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.control.control import sampler_name
from draftsmith.serve.engine.round import Round
from draftsmith.serve.engine.scheduler import ScheduledRow
from draftsmith.serve.requests.request import Request, TapLog

log = logging.getLogger(__name__)


class RoundRecorder:
    """Sink of an engine's rounds; None records nothing and costs nothing.

    Args:
        rule: of verification, as in the record.
        taps: raw ids of the layers whose states records hold.
    """

    def __init__(
        self,
        sink: Sink | None,
        target: Target,
        config: EngineConfig,
        *,
        rule: str,
        taps: tuple[int, ...],
    ):
        self.taps, self.tap_positions = taps, config.record_taps
        self.num_untapped = 0  # recorded requests whose states have a hole
        self.sink, self.target, self.target_revision = sink, target.name, target.revision
        self.rule, self.engine = rule, config.engine_name
        # drafts are the draft's likeliest tokens where a request names no temperature
        self.greedy = config.draft_sampling == "greedy"
        self.num_records = 0
        # Records of this round, and its logits.
        self._rows: list[RoundRow] = []
        self._logged: LoggedRound | None = None
        # In order; the first one's distributions are on their way from a device.
        self._late: list[RecordedRound] = []

    def records(self, request: Request) -> bool:
        """True when the request's rounds are recorded: decided once, so that records hold whole
        requests."""
        if self.sink is None:
            return False
        state, options = request.recording, request.options
        if state.share is None:
            # Learning has the base for its target: an adapter has another distribution.
            allowed = options.learn and not request.repeatable and not options.adapter
            share = self.sink.share if allowed else 0.0
            state.share = share if uniform(request.id, "record") < share else 0.0
        return state.share > 0

    def begin(self, request: Request) -> None:
        """Called before a request is admitted: whether its records hold states decides which cached
        blocks it can go on from."""
        if self.tap_positions > 0 and self.records(request):
            most = min(self.tap_positions, request.num_prompt + request.max_tokens)
            request.recording.tap_log = TapLog(most)

    def keep_taps(self, request: Request, position: int, states: torch.Tensor) -> None:
        """Keeps `states` [n, taps * H] of a pass over known tokens from `position` on."""
        log = request.recording.tap_log
        if log is None or log.is_full:
            return
        wanted = states[: log.most - position].to(torch.bfloat16)
        log.add(position, wanted.view(torch.int16).cpu().numpy().view(np.uint16))
        self.num_untapped += log.has_hole

    def _new_taps(self, request: Request, log: TapLog) -> RecordedTaps | None:
        """States of the request's text that no record holds yet."""
        begin, end = log.recorded, min(log.end, request.num_tokens)
        values = log.between(begin, end)
        if values is None:
            return None
        log.recorded = end
        return RecordedTaps(self.taps, begin, values)

    def round(self, row: ScheduledRow, committed: list[int], round: Round, version: str) -> None:
        """Record the part of a request with drafted tokens in a round. `committed` is in
        `request.tokens` already."""
        request, drafted = row.request, round.drafted
        if self._logged is None:
            self._logged = LoggedRound(round.output.logits, drafted.logits, drafted.chains)
        head = self._head(request, version, drafted.drawn)
        position = request.num_tokens - len(committed)
        place = row.place if request.recording.has_distributions else -1
        self._add(
            request, head, position, row.drafted, row.accepted, committed, row.emitted[-1], place
        )

    def finish(self, request: Request) -> None:
        """Record the tokens committed since the last record, which completes the text, and the
        end."""
        self._add(request, self._head(request, "", None), request.num_tokens, last=True)
        request.recording.tap_log = None
        self._send()

    def end_round(self) -> None:
        """Called after the records of a round, before the engine uses the memory of its logits
        again: what a sink keeps of them it has copied then."""
        if self._late:
            self.put_late()
        if self._rows:
            self._send()
        self._logged = None

    def _head(self, request: Request, version: str, drawn: bool | None) -> RecordHead:
        """Properties that the request's records share while `version` drafts for it."""
        state = request.recording
        if state.head is not None and state.head_of == (version, drawn):
            return state.head
        params = request.params
        sampler = "" if drawn is None else sampler_name(params, drawn=drawn, greedy=self.greedy)
        assert state.share is not None
        state.has_distributions = not params.adjusts
        state.head_of = version, drawn
        state.head = RecordHead(
            request=hashed(request.id),
            request_class=request.options.request_class,
            target=self.target,
            target_revision=self.target_revision,
            draft_version=version,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            share=state.share,
            rule=self.rule,
            engine=self.engine,
            sampler=sampler,
        )
        return state.head

    def _add(
        self,
        request: Request,
        head: RecordHead,
        position: int,
        drafted: Sequence[int] = (),
        accepted: int = 0,
        committed: Sequence[int] = (),
        emitted: int = -1,
        place: int = -1,
        *,
        last: bool = False,
    ) -> None:
        state = request.recording
        context = request.tokens[state.num_tokens : position]
        taps = None if state.tap_log is None else self._new_taps(request, state.tap_log)
        self._rows.append(
            RoundRow(
                head, state.num_records, position, context, drafted, accepted, committed, emitted,
                last, taps, place,
            )
        )  # fmt: skip
        state.num_records += 1
        state.num_tokens = request.num_tokens
        self.num_records += 1

    def _send(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        round, logged = RecordedRound(rows, time.time(), self._logged), self._logged
        if logged is not None and logged.is_late:
            # Until the next round's end, when its distributions have arrived: no wait for them.
            logged.begin([row for row in rows if row.place >= 0])
        elif not self._late:
            self._put(round)
            return
        self._late.append(round)

    def put_late(self) -> None:
        """Hand over what was kept back for distributions that were on their way from a device."""
        late, self._late = self._late, []
        for round in late:
            self._put(round)

    def _put(self, round: RecordedRound) -> None:
        if self.sink is None:
            return
        try:
            self.sink.put_round(round)
        except Exception:
            # A sink must not raise; one that does must still not stop a request.
            log.exception("the round sink failed; recording stops")
            self.sink = None
