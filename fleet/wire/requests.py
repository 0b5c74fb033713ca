"""Running requests of another engine: their text so far, and the records of their rounds.

A round whose drafted tokens are missing or do not fit what was sampled is text all the same: its
tokens are the context of the next record.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from draftsmith.fleet.wire.messages import RequestMeta, StepMeta, WireMessage
from draftsmith.kernels.sampling.logged import prob_arrays
from draftsmith.record import (
    Distributions,
    ProbArrays,
    RecordHead,
    RoundRecord,
    RoundRow,
    hashed_answer,
)

# vLLM runs `ANSWER-RANDOM`, for a completion `ANSWER-PROMPT-RANDOM`, and in front of either the
# number among several answers to a prompt.
RUNNING = re.compile(
    r"(?:(?P<choice>\d+)_)?(?P<answer>.+?)(?:-(?P<prompt>\d+))?-(?P<random>[0-9a-f]{8})"
)


@dataclass(frozen=True)
class EngineJob:
    """Properties that all records of an engine share."""

    buffer: str
    engine: str
    target: str
    target_revision: str
    sampler: str
    rule: str
    share: float
    max_length: int  # of a text, prompt included; an answer ends there


@dataclass
class RunningRequest:
    meta: RequestMeta
    head: RecordHead  # of its records without drafts
    tokens: list[int]
    prompt_length: int
    recorded: int = 0  # tokens that are in records
    records: int = 0

    def trim(self, tokens: list[int], max_length: int) -> tuple[list[int], bool]:
        """Tokens up to the one that ends the request, and True where one does: as the scheduler of
        the engine trims. A stop string is not seen here; a few tokens behind it are kept."""
        answered = len(self.tokens) - self.prompt_length
        most = min(max_length - len(self.tokens), self.meta.max_tokens - answered)
        for number, token in enumerate(tokens, 1):
            if token in self.meta.stops or number >= most:
                return tokens[:number], True
        return tokens, False


def record_name(request_id: str) -> str:
    """Name of a request in records. It begins as that of its answer, so that `draftsmith forget`
    finds it by the id which the client was given."""
    found = RUNNING.fullmatch(request_id)
    if found is None:
        return f"{hashed_answer(request_id)}-0"
    answer, prompt = found["answer"], found["prompt"]
    if prompt is not None and not answer.startswith("cmpl-"):
        answer, prompt = f"{answer}-{prompt}", None
    return f"{hashed_answer(answer)}-{prompt or 0}.{found['choice'] or 0}.{found['random']}"


class Requests:
    """All running requests of an engine. Methods that end or continue one return its records."""

    def __init__(self, job: EngineJob):
        self.job = job
        self.running: dict[int, RunningRequest] = {}
        self.mismatched = 0  # rounds whose drafted tokens did not fit the sampled ones

    def begin(self, handle: int, meta: RequestMeta, prompt: list[int]) -> None:
        head = RecordHead(
            request=record_name(meta.id),
            request_class=meta.request_class,
            target=self.job.target,
            target_revision=self.job.target_revision,
            temperature=meta.temperature,
            top_k=meta.top_k,
            top_p=meta.top_p,
            min_p=meta.min_p,
            share=meta.share,
            rule=self.job.rule,
            engine=self.job.engine,
            seeded=meta.seeded,
        )
        self.running[handle] = RunningRequest(meta, head, prompt, len(prompt))

    def temperatures(self) -> Mapping[int, float]:
        return {handle: one.meta.temperature for handle, one in self.running.items()}

    def sampled(
        self, handle: int, tokens: list[int], drafted: LoggedPositions | None
    ) -> list[RoundRecord]:
        """Tokens that a step sampled for a request, before any trimming."""
        request = self.running.get(handle)
        if request is None or not tokens:
            return []
        committed, ended = request.trim(tokens, self.job.max_length)
        records = []
        if drafted is not None and self._fits(tokens, drafted):
            records.append(self._round(request, tokens, committed, drafted))
        request.tokens += committed
        if records:
            request.recorded = len(request.tokens)
        return records + (self.end(handle) if ended else [])

    def resumed(self, handle: int, tokens: list[int]) -> list[RoundRecord]:
        """A request goes on with `tokens`, later ones of which may still be on their way here. One
        that goes on with others than it has ends: records of these are out already."""
        request = self.running.get(handle)
        if request is None or request.tokens == tokens[: len(request.tokens)]:
            return []
        self.mismatched += 1
        return self.end(handle)

    def end(self, handle: int) -> list[RoundRecord]:
        """Last record of a request, with the tokens that no record has yet."""
        request = self.running.pop(handle, None)
        if request is None or len(request.tokens) == request.prompt_length:
            return []
        return [self._record(request, request.head, last=True)]

    def _fits(self, tokens: list[int], drafted: LoggedPositions) -> bool:
        accepted = len(tokens) - 1
        kept = drafted.drafted[:accepted]
        fits = tokens[:accepted] == kept and min(drafted.drafted, default=-1) >= 0
        self.mismatched += not fits
        return fits

    def _round(
        self,
        request: RunningRequest,
        tokens: list[int],
        committed: list[int],
        drafted: LoggedPositions,
    ) -> RoundRecord:
        # vLLM draws drafts at the request's temperature alone.
        is_unfiltered = self.job.sampler == "probabilistic" and request.meta.filters
        head = replace(
            request.head,
            draft_version=drafted.draft_version,
            weight_version=drafted.weight_version,
            sampler="unfiltered" if is_unfiltered else self.job.sampler,
        )
        record = self._record(
            request,
            head,
            drafted=drafted.drafted,
            accepted=len(tokens) - 1,
            committed=committed,
            emitted=tokens[-1],
        )
        if not request.meta.adjusts:
            record.p, record.q = drafted.p, drafted.q
        return record

    def _record(self, request: RunningRequest, head: RecordHead, **row: Any) -> RoundRecord:
        context = request.tokens[request.recorded :]
        made = RoundRow(head, request.records, len(request.tokens), context, **row)
        request.records += 1
        return made.record(time.time())


@dataclass(frozen=True)
class LoggedPositions:
    """Drafted tokens of one request in a step, with p and q at each."""

    drafted: list[int]
    p: Distributions
    q: Distributions
    draft_version: str
    weight_version: str


def rounds_of(
    message: WireMessage, temperatures: Mapping[int, float]
) -> dict[int, LoggedPositions]:
    """Rounds by handle, free of the ring's memory."""
    meta: StepMeta = message.meta(StepMeta)
    handles, counts, drafted = (array.tolist() for array in message.arrays[1:4])
    values = message.arrays[4:]
    if meta.dtype:
        spread = [temperatures.get(h, 1.0) for h, n in zip(handles, counts) for _ in range(n)]
        p, q = _from_raw(values, meta, spread, drafted)
    else:
        p, q = _from_reduced(values, drafted)
    rounds, begin = {}, 0
    for handle, count in zip(handles, counts):
        end = begin + count
        rounds[handle] = LoggedPositions(
            drafted[begin:end],
            Distributions(p, begin, end),
            Distributions(q, begin, end),
            meta.draft_version,
            meta.weight_version,
        )
        begin = end
    return rounds


def _from_raw(
    values: list[np.ndarray], meta: StepMeta, temperatures: list[float], drafted: list[int]
) -> tuple[ProbArrays, ProbArrays]:
    p_logits = torch.from_numpy(values[0]).view(getattr(torch, meta.dtype))
    p = prob_arrays(p_logits, drafted, temperatures)
    if not values[1].size:
        return p, ProbArrays.one_hot(drafted)
    q_values = torch.from_numpy(values[1]).float()
    q_logits = q_values.log() if meta.q_is_probs else q_values
    return p, prob_arrays(q_logits, drafted)


def _from_reduced(values: list[np.ndarray], drafted: list[int]) -> tuple[ProbArrays, ProbArrays]:
    kept = [one.copy() for one in values]
    q = ProbArrays.of_columns(*kept[3:]) if len(kept) > 3 else ProbArrays.one_hot(drafted)
    return ProbArrays.of_columns(*kept[:3]), q
