"""Round records: what verification learned about the draft, handed to the sink the caller plugged in."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence

import torch

from draftsmith.kernels.laws import TopLaw, top_law
from draftsmith.serve.drafting import Drafts
from draftsmith.serve.record import TOP, Law, RoundRecord, Sink
from draftsmith.serve.request import Request
from draftsmith.serve.scheduler import Row

log = logging.getLogger(__name__)


class RoundLaws:
    """p and q at every drafted position of one engine round, as Python lists; one top-k for all rows together.

    Args:
        raw: [R, V] unprocessed target logits; drafting row b owns `len(chains[b]) + 1` consecutive ones.
        temperatures: of each drafting row.
    """

    def __init__(self, raw: torch.Tensor, drafts: Drafts, temperatures: Sequence[float]):
        self.begins: list[int] = []
        rows: list[int] = []
        spread: list[float] = []
        begin = 0
        for chain, temperature in zip(drafts.chains, temperatures):
            self.begins.append(len(rows))
            rows += range(begin, begin + len(chain))
            spread += [temperature] * len(chain)
            begin += len(chain) + 1
        logits = raw[rows]
        self.p = _laws(top_law(logits, TOP))
        self.log_norms = _log_norms(logits, spread)
        self.q = _draft_laws(drafts, sum(len(chain) for chain in drafts.chains))


def _laws(law: TopLaw) -> list[Law]:
    return [Law(*parts) for parts in zip(law.ids.tolist(), law.logprobs.tolist(), law.tail.tolist())]


def _log_norms(logits: torch.Tensor, temperatures: list[float]) -> list[float]:
    """log sum_v exp(logprob_v / temperature), 0 where the temperature is 0 or 1."""
    if all(temperature in (0.0, 1.0) for temperature in temperatures):
        return [0.0] * len(temperatures)
    scale = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float32, device=logits.device)[:, None]
    return torch.logsumexp(torch.log_softmax(logits, dim=-1) / scale, dim=-1).tolist()


def _draft_laws(drafts: Drafts, num_rows: int) -> list[Law]:
    if drafts.logits is None:
        return [Law([token], [0.0], 0.0) for chain in drafts.chains for token in chain]
    if num_rows == sum(drafts.tokens.shape[1] for _ in drafts.chains):
        used = drafts.logits.flatten(0, 1)
    else:
        used = torch.cat([drafts.logits[b, : len(chain)] for b, chain in enumerate(drafts.chains)])
    return [_finite(law) for law in _laws(top_law(used, TOP))]


def _finite(law: Law) -> Law:
    """Without the entries of probability zero: -inf is no JSON number and says nothing."""
    keep = [i for i, logprob in enumerate(law.logprobs) if logprob > float("-inf")]
    if len(keep) == len(law.ids):
        return law
    return Law([law.ids[i] for i in keep], [law.logprobs[i] for i in keep], law.tail)


class Recorder:
    """`sink` None records nothing and costs nothing."""

    def __init__(self, sink: Sink | None, *, target: str, target_revision: str):
        self.sink, self.target, self.target_revision = sink, target, target_revision
        self.num_records = 0

    def wants(self, request: Request) -> bool:
        return self.sink is not None and request.learn

    def round(
        self,
        row: Row,
        drafted: list[int],
        accepted: int,
        committed: list[int],
        emitted: int,
        laws: RoundLaws,
        index: int,
        version: str,
    ) -> None:
        """One round with drafted tokens; row `index` of `laws`. `committed` is in `request.tokens` already."""
        request = row.request
        position = request.num_tokens - len(committed)
        span = slice(laws.begins[index], laws.begins[index] + len(drafted))
        record = self._record(request, position, request.tokens[request.recorded : position], version)
        record.drafted, record.accepted, record.committed, record.emitted = drafted, accepted, committed, emitted
        if not request.params.adjusts:
            record.p, record.p_log_norm, record.q = laws.p[span], laws.log_norms[span], laws.q[span]
        self._put(request, record)

    def finish(self, request: Request) -> None:
        """Tokens committed since the last record, so that the request's text is complete."""
        if request.recorded < request.num_tokens:
            self._put(request, self._record(request, request.num_tokens, request.tokens[request.recorded :], ""))

    def _record(self, request: Request, position: int, context: list[int], version: str) -> RoundRecord:
        params = request.params
        return RoundRecord(
            request=hashlib.sha256(request.id.encode()).hexdigest()[:16],
            round=request.num_records,
            request_class=request.request_class,
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
        )

    def _put(self, request: Request, record: RoundRecord) -> None:
        assert self.sink is not None
        request.num_records += 1
        request.recorded = request.num_tokens
        self.num_records += 1
        try:
            self.sink.put(record)
        except Exception:
            # A sink must not raise; one that does must still not stop a request.
            log.exception("the round sink failed; recording stops")
            self.sink = None
