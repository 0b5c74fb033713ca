"""Round records: drafted tokens with p and q at their positions, handed to the sink."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from draftsmith.kernels.sampling.logged import log_norms_of, prob_arrays
from draftsmith.record import (
    Distributions,
    ProbArrays,
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
    """p and q at every drafted position of one engine round. On a CPU the engine's thread only
    copies logits, which is cheap; the likeliest tokens are found on the first access, on the sink's
    thread.

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
        self._p_logits: torch.Tensor | None = raw[rows]
        self._q_logits = _draft_logits(proposal, lengths)
        self._tokens = [
            token for chain, flag in zip(proposal.chains, recorded) if flag for token in chain
        ]
        self._spread = [
            t for t, length in zip(temperatures, lengths) if t is not None for _ in range(length)
        ]
        self._lock = threading.Lock()
        self._made: tuple[ProbArrays, ProbArrays] | None = None
        if raw.is_cuda:
            # There it costs a launch, and the memory of many rounds' logits would be the models'.
            self.make()

    @property
    def raw_bytes(self) -> int:
        return sum(
            logits.nbytes for logits in (self._p_logits, self._q_logits) if logits is not None
        )

    def p(self, index: int) -> Distributions:
        return Distributions(self._make_p, self.begins[index], self.begins[index + 1])

    def q(self, index: int) -> Distributions:
        return Distributions(self._make_q, self.begins[index], self.begins[index + 1])

    def _make_p(self) -> ProbArrays:
        return self.make()[0]

    def _make_q(self) -> ProbArrays:
        return self.make()[1]

    def make(self) -> tuple[ProbArrays, ProbArrays]:
        """The arrays of p and q; after it the logits are gone."""
        with self._lock:
            if self._made is None:
                assert self._p_logits is not None
                log_norms = log_norms_of(self._p_logits, self._spread)
                p = prob_arrays(self._p_logits, log_norms, self._tokens)
                none = np.zeros(len(self._tokens), dtype=np.float32)
                if self._q_logits is None:
                    ids = np.array(self._tokens, dtype=np.int32)[:, None]
                    q = ProbArrays(ids, np.zeros(ids.shape, dtype=np.float32), none, none, none)
                else:
                    q = prob_arrays(self._q_logits, none, self._tokens)
                self._made, self._p_logits, self._q_logits = (p, q), None, None
            return self._made


def _draft_logits(proposal: RoundProposal, lengths: list[int]) -> torch.Tensor | None:
    """[n, V], a copy: the drafter may use its memory again."""
    if proposal.logits is None:
        return None
    return torch.cat([proposal.logits[row, :length] for row, length in enumerate(lengths)])


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
        self._unmade: deque[RoundDistributions] = deque()

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
            self._bound(distributions)
        self._put(request, record)

    def finish(self, request: Request) -> None:
        """Record the tokens committed since the last record, which completes the text, and the
        end."""
        rest = request.tokens[request.recording.num_tokens :]
        record = self._record(request, request.num_tokens, rest, "")
        record.last = True
        request.recording.tap_log = None
        self._put(request, record)

    def _bound(self, distributions: RoundDistributions) -> None:
        if self._unmade and self._unmade[-1] is distributions:
            return
        self._unmade.append(distributions)
        while self._unmade and self._unmade[0].raw_bytes == 0:
            self._unmade.popleft()
        raw_bytes = sum(one.raw_bytes for one in self._unmade)
        while raw_bytes > MAX_RAW_BYTES:
            oldest = self._unmade.popleft()
            raw_bytes -= oldest.raw_bytes
            oldest.make()

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
        assert self.sink is not None
        request.recording.num_records += 1
        request.recording.num_tokens = request.num_tokens
        self.num_records += 1
        try:
            self.sink.put(record)
        except Exception:
            # A sink must not raise; one that does must still not stop a request.
            log.exception("the round sink failed; recording stops")
            self.sink = None
