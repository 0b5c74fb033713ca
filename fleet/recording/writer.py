"""Writer process beside an engine: `python -m draftsmith.fleet.recording.writer DESCRIPTOR JOB`.

Reads messages from the ring, writes records through the buffer's own writer, and leaves its status
in the ring. It ends when its standard input does, as it does with the engine, after it has read
and flushed everything. It runs at a lower priority than the engine, on any core.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from draftsmith import shared_ring as ring_arrays
from draftsmith.child_process import end_of_engine
from draftsmith.distill.buffer.buffer import BufferWriter
from draftsmith.distill.buffer.process_writer import begin, end, read_until
from draftsmith.distill.monitor.monitor import Monitor, name_of
from draftsmith.fleet.engine import logger
from draftsmith.fleet.recording.messages import MessageKind, RequestMeta, StepMeta, read_meta
from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.kernels.sampling.logged import prepare_arrays, prob_arrays
from draftsmith.record import (
    Distributions,
    ProbArrays,
    RecordHead,
    RoundRecord,
    RoundRow,
    hashed_answer,
)
from draftsmith.shared_ring import Ring

STATUS_S = 1.0
# Steps whose drafted tokens wait for sampled ones.
STEPS = 64
# For a buffer that cannot be opened or written when the engine has ended.
PATIENCE_S = 300.0
# Chance that an engine which samples rightly ever raises an alarm.
FALSE_ALARM = 1e-3
# Records that are judged at once: numbers of arrays, not of calls, should cost.
BATCH = 256
# Versions whose figures are kept: the latest.
VERSIONS = 16


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

    def record(self, head: RecordHead, **row: Any) -> RoundRecord:
        context = self.tokens[self.recorded :]
        made = RoundRow(head, self.records, len(self.tokens), context, **row)
        self.records += 1
        return made.record(time.time())


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


@dataclass(frozen=True)
class LoggedPositions:
    """Drafted tokens of one request in a step, with p and q at each."""

    drafted: list[int]
    p: Distributions
    q: Distributions
    draft_version: str
    weight_version: str


def rounds_of(
    arrays: list[np.ndarray], temperatures: Mapping[int, float]
) -> dict[int, LoggedPositions]:
    """Rounds by handle, free of the ring's memory."""
    meta = read_meta(StepMeta, arrays[0])
    handles, counts, drafted = (array.tolist() for array in arrays[1:4])
    values = arrays[4:]
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


@dataclass
class ServedFigures:
    engine: str
    monitor: Monitor = field(default_factory=lambda: Monitor(FALSE_ALARM))
    versions: dict[str, AcceptanceCounts] = field(default_factory=dict)
    waiting: list[RoundRecord] = field(default_factory=list)

    def add(self, record: RoundRecord) -> list[str]:
        """Count a record; returns the alarms that are raised, one sentence each."""
        if record.drafted:
            counts = self.versions.setdefault(record.draft_version, AcceptanceCounts())
            counts.add([len(record.drafted)], [record.accepted], [len(record.committed)])
            if not record.seeded:
                self.waiting.append(record)
        while len(self.versions) > VERSIONS:
            del self.versions[next(iter(self.versions))]
        return self.judge() if len(self.waiting) >= BATCH else []

    def judge(self) -> list[str]:
        """Judge the records that wait for it."""
        waiting, self.waiting = self.waiting, []
        return self.monitor.look(waiting) if waiting else []

    def figures(self) -> dict[str, dict[str, float]]:
        """Figures by version: rounds, offered positions, accepted and committed tokens, alpha, tau;
        z of `accepted`, log10 of the evidence against losslessness, and 1 under `alarm` where it
        was enough."""
        judged = self.monitor.numbers()
        return {
            version: {
                "rounds": counts.rounds,
                "positions": (offered := sum(counts.offered)),
                "accepted": (accepted := sum(counts.accepted)),
                "committed": counts.num_committed,
                "alpha": accepted / max(1, offered),
                "tau": counts.tau or 0.0,
                **_losslessness(judged.get(name_of(self.engine, version), {})),
            }
            for version, counts in self.versions.items()
        }


def _losslessness(numbers: dict[str, Any]) -> dict[str, float]:
    return {
        "judged": numbers.get("positions", 0),
        "z": numbers.get("z_accepted", 0.0),
        "log10_evidence": numbers.get("log10_evidence", 0.0),
        "alarm": numbers.get("alarm", 0.0),
    }


class EngineWriter:
    """Messages of an engine to records of its requests."""

    def __init__(self, ring: Ring, job: EngineJob):
        prepare_arrays()  # no step waits for it later
        self.ring, self.job = ring, job
        self.running: dict[int, RunningRequest] = {}
        self.mismatched = 0  # rounds whose drafted tokens did not fit the sampled ones
        self.served = ServedFigures(job.engine)
        self.buffer = BufferWriter(job.buffer, share=job.share)
        self.steps: dict[int, dict[int, LoggedPositions]] = {}
        self.failed, self.left_s = 0, 0.0
        self._read: Mapping[MessageKind, Callable[[int, list[np.ndarray]], None]] = {
            MessageKind.BEGIN: self._begin,
            MessageKind.POSITIONS: self._positions,
            MessageKind.TOKENS: self._tokens,
            MessageKind.END: self._end,
            MessageKind.RESUME: self._resume,
        }

    def take(self) -> bool:
        room = self.ring.next()
        if room is None:
            return False
        kind, number, arrays = ring_arrays.parse(room)
        try:
            self._read[MessageKind(kind)](number, arrays)
        except Exception:
            self.failed += 1
            if self.failed <= 3:
                logger.exception("a message of the engine was not understood")
        self.ring.release()
        return True

    def _begin(self, handle: int, arrays: list[np.ndarray]) -> None:
        meta, prompt = read_meta(RequestMeta, arrays[0]), arrays[1].tolist()
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

    def _positions(self, step: int, arrays: list[np.ndarray]) -> None:
        temperatures = {handle: one.meta.temperature for handle, one in self.running.items()}
        self.steps[step] = rounds_of(arrays, temperatures)
        while len(self.steps) > STEPS:
            del self.steps[next(iter(self.steps))]

    def _tokens(self, step: int, arrays: list[np.ndarray]) -> None:
        handles, counts, tokens = (array.tolist() for array in arrays)
        rounds = self.steps.pop(step, {})
        begin = 0
        for handle, count in zip(handles, counts):
            end = begin + count
            self._sampled(handle, tokens[begin:end], rounds.get(handle))
            begin = end

    def _end(self, _: int, arrays: list[np.ndarray]) -> None:
        for handle in arrays[0].tolist():
            self._finish(handle)

    def _resume(self, handle: int, arrays: list[np.ndarray]) -> None:
        """A request goes on with tokens, later ones of which may still be on their way here. One
        that goes on with others than it has ends: records of these are out already."""
        request, tokens = self.running.get(handle), arrays[0].tolist()
        if request is not None and request.tokens != tokens[: len(request.tokens)]:
            self.mismatched += 1
            self._finish(handle)

    def _sampled(self, handle: int, tokens: list[int], drafted: LoggedPositions | None) -> None:
        """Tokens that a step sampled for a request, before any trimming."""
        request = self.running.get(handle)
        if request is None or not tokens:
            return
        committed, ended = request.trim(tokens, self.job.max_length)
        is_round = drafted is not None and self._fits(tokens, drafted)
        if drafted is not None and is_round:
            self._put(self._round(request, tokens, committed, drafted))
        request.tokens += committed
        if is_round:
            request.recorded = len(request.tokens)
        if ended:
            self._finish(handle)

    def _finish(self, handle: int) -> None:
        """Last record of a request, with the tokens that no record has yet."""
        request = self.running.pop(handle, None)
        if request is not None and len(request.tokens) > request.prompt_length:
            self._put(request.record(request.head, last=True))

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
        record = request.record(
            head,
            drafted=drafted.drafted,
            accepted=len(tokens) - 1,
            committed=committed,
            emitted=tokens[-1],
        )
        if not request.meta.adjusts:
            record.p, record.q = drafted.p, drafted.q
        return record

    def _put(self, record: RoundRecord) -> None:
        self.buffer.put(record)
        for alarm in self.served.add(record):
            logger.error("draftsmith: %s", alarm)

    def leave(self) -> None:
        if time.monotonic() - self.left_s > STATUS_S:
            self._leave()

    def _leave(self) -> None:
        for alarm in self.served.judge():
            logger.error("draftsmith: %s", alarm)
        status = {
            "at_s": time.time(),
            "written": self.buffer.written,
            "dropped": self.buffer.dropped,
            "running": len(self.running),
            "mismatched": self.mismatched,
            "failed": self.failed,
            "versions": self.served.figures(),
        }
        self.ring.share = self.buffer.share
        self.ring.leave_status(json.dumps(status).encode())
        self.left_s = time.monotonic()

    def close(self) -> None:
        """Write the text that unfinished requests have so far, and flush. The engine has ended, and
        its last records are only here: a buffer that is away is waited for."""
        for handle in list(self.running):
            self._finish(handle)
        self.buffer.close(patience_s=PATIENCE_S)
        self._leave()


def run(ring: Ring, job: EngineJob, ended: Callable[[float], bool]) -> None:
    read_until(ended, partial(EngineWriter, ring, job), patience_s=PATIENCE_S)


def main(descriptor: str, job: str) -> None:
    begin()
    if hasattr(os, "sched_setaffinity"):
        # The engine binds its threads to cores and its children with them.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    end(lambda: run(Ring(int(descriptor)), EngineJob(**json.loads(job)), end_of_engine()))


if __name__ == "__main__":
    main(*sys.argv[1:])
