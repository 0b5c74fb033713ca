"""Round records: drafted tokens with p and q at their positions, handed to the sink."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from draftsmith.kernels.sampling.logged import LoggedLogits, OneHot
from draftsmith.record import (
    Distributions,
    RecordedTaps,
    RoundRecord,
    Sink,
    hashed,
    uniform,
)
from draftsmith.serve.control.draft_temperature import sampler_name
from draftsmith.serve.engine.round import RoundProposal, RowOutput
from draftsmith.serve.requests.request import Request
from draftsmith.serve.requests.tap_log import TapLog

log = logging.getLogger(__name__)

# Most bytes of logits whose distributions the sink has not read yet; beyond it the engine's thread
# makes the oldest distributions itself.
MAX_RAW_BYTES = 128 << 20


class RoundDistributions:
    """p and q at every drafted position of one engine round. On a CPU the engine's thread finds
    nothing in them: the likeliest tokens are found where the sink reads them. Until `keep` they are
    in the engine's memory, which the next round may use.

    Args:
        raw: [R, V] unprocessed target logits; drafting row b owns `len(chains[b]) + 1` consecutive
        ones.
        temperatures: of each drafting row, None where its distributions are not recorded.
    """

    def __init__(
        self, raw: torch.Tensor, proposal: RoundProposal, temperatures: Sequence[float | None]
    ):
        recorded = [temperature is not None for temperature in temperatures]
        lengths = [len(chain) * flag for chain, flag in zip(proposal.chains, recorded)]
        self.begins = [0, *accumulate(lengths)]
        firsts = [0, *accumulate(len(chain) + 1 for chain in proposal.chains)]
        rows = [first + depth for first, length in zip(firsts, lengths) for depth in range(length)]
        self.drawn = proposal.drawn
        tokens = [
            token for chain, flag in zip(proposal.chains, recorded) if flag for token in chain
        ]
        spread = [
            t for t, length in zip(temperatures, lengths) if t is not None for _ in range(length)
        ]
        self.p_source = LoggedLogits(raw, rows, tokens, spread)
        self.q_source: LoggedLogits | OneHot = OneHot(tokens)
        if proposal.logits is not None:
            depth = proposal.logits.shape[1]
            rows = [row * depth + at for row, length in enumerate(lengths) for at in range(length)]
            self.q_source = LoggedLogits(proposal.logits.flatten(0, 1), rows, tokens)
        if raw.is_cuda:
            # There it costs a launch, and the memory of many rounds' logits would be the models'.
            self.p_source()
            self.q_source()

    def p(self, index: int) -> Distributions:
        return Distributions(self.p_source, self.begins[index], self.begins[index + 1])

    def q(self, index: int) -> Distributions:
        return Distributions(self.q_source, self.begins[index], self.begins[index + 1])


class Recorder:
    """Sink of an engine's rounds; None records nothing and costs nothing.

    Args:
        rule: of verification, as in the record.
        engine: name of the engine, as in the record.
        greedy: drafts are the draft's likeliest tokens where a request names no temperature.
        taps: raw ids of the layers whose states records hold, and of how many first positions of a
            text; with 0 positions they hold none.
    """

    def __init__(
        self,
        sink: Sink | None,
        *,
        target: str,
        target_revision: str,
        rule: str = "",
        greedy: bool = False,
        engine: str = "",
        taps: tuple[int, ...] = (),
        tap_positions: int = 0,
    ):
        self.taps, self.tap_positions = taps, tap_positions
        self.num_untapped = 0  # recorded requests whose states have a hole
        self.sink, self.target, self.target_revision = sink, target, target_revision
        self.rule, self.greedy, self.engine = rule, greedy, engine
        self.num_records = 0
        # Logits of this round, and those of earlier ones that the sink keeps.
        self._present: list[weakref.ref[LoggedLogits]] = []
        self._unmade: deque[weakref.ref[LoggedLogits]] = deque()

    def records(self, request: Request) -> bool:
        """True when the request's rounds are recorded: decided once, so that records hold whole
        requests."""
        if self.sink is None or not request.options.learn or request.repeatable:
            return False
        if request.options.adapter:
            # Learning has the base for its target, whose distribution is another.
            return False
        state = request.recording
        if state.share is None:
            share = self.sink.share
            state.share = share if uniform(request.id) < share else 0.0
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

    def _new_taps(self, request: Request) -> RecordedTaps | None:
        """States of the request's text that no record holds yet."""
        log = request.recording.tap_log
        if log is None:
            return None
        begin, end = log.recorded, min(log.end, request.num_tokens)
        values = log.between(begin, end)
        if values is None:
            return None
        log.recorded = end
        return RecordedTaps(self.taps, begin, values)

    def round(
        self,
        row: RowOutput,
        committed: list[int],
        distributions: RoundDistributions,
        version: str,
    ) -> None:
        """Record one round with drafted tokens. `committed` is in `request.tokens` already."""
        request = row.row.request
        position = request.num_tokens - len(committed)
        record = self._record(
            request, position, request.tokens[request.recording.num_tokens : position], version
        )
        record.drafted, record.accepted = row.drafted, row.accepted
        record.committed, record.emitted = committed, row.emitted[-1]
        record.sampler = sampler_name(
            request.params, drawn=distributions.drawn[row.index], greedy=self.greedy
        )
        if not request.params.adjusts:
            record.p, record.q = distributions.p(row.index), distributions.q(row.index)
            sources = (distributions.p_source, distributions.q_source)
            self._present = [weakref.ref(one) for one in sources if isinstance(one, LoggedLogits)]
        self._put(request, record)

    def finish(self, request: Request) -> None:
        """Record the tokens committed since the last record, which completes the text, and the
        end."""
        rest = request.tokens[request.recording.num_tokens :]
        record = self._record(request, request.num_tokens, rest, "")
        record.last = True
        request.recording.tap_log = None
        self._put(request, record)

    def end_round(self) -> None:
        """Called after the records of a round, before the engine uses the memory of its logits
        again. What a sink has then copied is gone; what it keeps is copied here, and bounded."""
        self._safely(lambda sink: sink.end_round())
        if not self._present:
            return
        kept = [one for reference in self._present if (one := reference()) is not None]
        self._present = []
        for one in kept:
            one.keep()
        self._unmade += map(weakref.ref, kept)
        if self._unmade:
            self._bound()

    def _bound(self) -> None:
        unmade = [one for reference in self._unmade if (one := reference()) and one.nbytes]
        raw_bytes = sum(one.nbytes for one in unmade)
        while unmade and raw_bytes > MAX_RAW_BYTES:
            oldest = unmade.pop(0)
            raw_bytes -= oldest.nbytes
            oldest()
        self._unmade = deque(map(weakref.ref, unmade))

    def _record(
        self, request: Request, position: int, context: list[int], version: str
    ) -> RoundRecord:
        params, state = request.params, request.recording
        assert state.share is not None
        return RoundRecord(
            request=hashed(request.id),
            round=state.num_records,
            request_class=request.options.request_class,
            target=self.target,
            target_revision=self.target_revision,
            draft_version=version,
            time_s=time.time(),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            position=position,
            context=context,
            drafted=[],
            accepted=0,
            committed=[],
            emitted=-1,
            share=state.share,
            rule=self.rule,
            engine=self.engine,
            taps=self._new_taps(request),
        )

    def _put(self, request: Request, record: RoundRecord) -> None:
        request.recording.num_records += 1
        request.recording.num_tokens = request.num_tokens
        self.num_records += 1
        self._safely(lambda sink: sink.put(record))

    def _safely(self, work: Callable[[Sink], None]) -> None:
        if self.sink is None:
            return
        try:
            work(self.sink)
        except Exception:
            # A sink must not raise; one that does must still not stop a request.
            log.exception("the round sink failed; recording stops")
            self.sink = None
