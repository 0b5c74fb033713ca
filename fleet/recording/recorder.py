"""Recorder in a vLLM worker: what each step says about requests, drafted and sampled tokens goes
into the ring, and nothing else happens on the engine's thread.

An error here drops the requests that are being recorded, which the writer ends where they are; it
never reaches the engine.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from draftsmith.child_process import Child
from draftsmith.fleet.engine import logger, request_options
from draftsmith.fleet.recording.messages import MessageKind, RequestMeta, StepMeta, meta_array
from draftsmith.fleet.recording.seam import Seam, Verified
from draftsmith.kernels.dispatch import reads_freely
from draftsmith.kernels.sampling.logged import late_arrays, on_its_way
from draftsmith.record import ProbArrays
from draftsmith.shared_ring import Spec, begin, send

# Part of the ring that one step's raw logits may take.
STEP_PART = 4
LOGGED_ERRORS = 3
# Rows of a step that an accelerator reduces; the requests behind them are text only in this step.
MOST_ROWS = 512
# Rows at once: 32 of 152,000 in float32 are 19 MB.
CHUNK = 32
# Distributions of chunks of rows, each once it is asked for.
Reduced = list[Callable[[], ProbArrays]]


class Serving(Protocol):
    @property
    def version(self) -> str:
        """Version of the draft that proposes now."""
        ...


class DraftedStep(NamedTuple):
    """Drafted positions of a step that are recorded: requests r, positions n."""

    handles: list[int]  # [r]
    counts: list[int]  # [r]
    temperatures: list[float]  # [n]
    at: torch.Tensor  # [n] positions among those of the step
    is_all: bool  # all of those


class EngineRecorder:
    """Wraps `execute_model` and `sample_tokens` of one worker and its rejection sampler.

    Args:
        most: share of new requests, where they name none.
        max_length: of a text.
    """

    def __init__(self, worker: Any, state: Serving, child: Child, *, most: float, max_length: int):
        self.worker, self.state, self.child, self.max_length = worker, state, child, max_length
        self.chooser = Chooser(most)
        self.tracked: dict[str, Tracked] = {}
        self.ended: list[int] = []  # handles whose end the writer has not been sent
        self.handles = self.step = self.generation = 0
        # Draft that made what the next step verifies.
        self.drafted_by = state.version
        self.weight_version = ""
        self.tokens = self.recorded = self.dropped = self.text_only = self.errors = 0
        self.spent_s = self.steps_s = self.begun_s = 0.0
        self._reduced: tuple[StepMeta, DraftedStep, Any, list[Reduced]] | None = None
        # The engine's thread and the one that fetches outputs write.
        self._lock = threading.Lock()
        self._execute, self._sample = worker.execute_model, worker.sample_tokens
        self.seam = Seam(worker.model_runner, lambda verified: self._safely(self._look, verified))
        worker.execute_model, worker.sample_tokens = self.execute_model, self.sample_tokens

    def close(self) -> None:
        """Take the wrappers off and end the writer, which flushes."""
        self.seam.remove()
        for name in ("execute_model", "sample_tokens"):
            self.worker.__dict__.pop(name, None)
        self.child.close()

    def status(self) -> dict[str, Any]:
        """Counts of this worker, and the writer's latest status under `writer`."""
        return {
            "recording": self.child.alive,
            "running": len(self.tracked),
            "tokens": self.tokens,
            "requests": self.recorded,
            "dropped_requests": self.dropped,
            "text_only_steps": self.text_only,
            "errors": self.errors,
            "engine_thread_share": self.spent_s / self.steps_s if self.steps_s else 0.0,
            "writer": self.child.status(),
        }

    # The worker's own calls.

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.begun_s = time.perf_counter()
        self._safely(self._before, scheduler_output)
        output = self._execute(scheduler_output, *args, **kwargs)
        return self._seen(output) if output is not None else None

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = self._sample(*args, **kwargs)
        self.drafted_by = self.state.version
        return self._seen(output)

    def _seen(self, output: Any) -> Any:
        self._safely(self._after, output)
        self.steps_s += time.perf_counter() - self.begun_s
        return output

    def _safely(self, function: Callable[[Any], None], value: Any) -> None:
        begun_s = time.perf_counter()
        try:
            function(value)
        except Exception:
            self.errors += 1
            if self.errors <= LOGGED_ERRORS:
                logger.exception("draftsmith: recording failed; its requests are left out")
            self._drop(list(self.tracked))
        self.spent_s += time.perf_counter() - begun_s

    # Requests.

    def _before(self, scheduler_output: Any) -> None:
        self.step += 1
        self._reduced = None
        if self.generation != self.child.generation or not self.child.alive:
            # A new writer has no beginning of them.
            self.dropped += len(self.tracked)
            self.tracked.clear()
            self.ended.clear()
            self.generation = self.child.generation
        for req_id in scheduler_output.finished_req_ids:
            if (tracked := self.tracked.pop(req_id, None)) is not None:
                self.ended.append(tracked.handle)
        if self.ended and self._send(MessageKind.END, 0, [_ints(self.ended)]):
            self.ended = []
        for new in scheduler_output.scheduled_new_reqs:
            self._begin(new)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id in cached.resumed_req_ids:
            self._resume(req_id, cached.all_token_ids.get(req_id))

    def _begin(self, new: Any) -> None:
        if new.req_id in self.tracked:
            prefill = getattr(new, "prefill_token_ids", None)
            self._resume(new.req_id, prefill if prefill is not None else new.prompt_token_ids)
            return
        ring = self.child.ring
        if not self.child.alive or not is_recordable(new) or ring.used > ring.capacity // 2:
            return
        share = self.chooser.share(new.sampling_params, ring.share)
        if share <= 0:
            return
        meta = meta_of(new, share, self.seam.kind, self.max_length)
        self.handles += 1
        arrays = [meta_array(meta), _ints(new.prompt_token_ids)]
        if self._send(MessageKind.BEGIN, self.handles, arrays):
            self.tracked[new.req_id] = Tracked(self.handles, meta.temperature)
            self.recorded += 1

    def _resume(self, req_id: str, tokens: Sequence[int] | None) -> None:
        """A request goes on after a preemption: the scheduler may have thrown away the last tokens
        that were sampled for it."""
        tracked = self.tracked.get(req_id)
        if tracked is None or tokens is None:
            return
        if not self._send(MessageKind.RESUME, tracked.handle, [_ints(tokens)]):
            self._drop([req_id])

    def _drop(self, req_ids: Sequence[str]) -> None:
        for req_id in req_ids:
            if (tracked := self.tracked.pop(req_id, None)) is not None:
                self.ended.append(tracked.handle)
                self.dropped += 1

    # Steps.

    def _look(self, verified: Verified) -> None:
        drafted = self._choose(verified)
        if drafted is None:
            return
        meta = StepMeta(self.drafted_by, self.weight_version, q_is_probs=verified.q_is_probs)
        if crosses_raw(verified.logits):
            self._copy_raw(verified, drafted, meta)
            return
        rows = verified.rows.long()[drafted.at]
        tokens = verified.drafted[drafted.at]
        logits, q = verified.logits, verified.q
        parts = [reduced(lambda at: logits[rows[at]], tokens, drafted.temperatures)]
        if q is not None:
            log = torch.log if verified.q_is_probs else (lambda values: values)
            parts.append(reduced(lambda at: log(q(drafted.at[at])), tokens))
        self._reduced = meta, drafted, on_its_way(tokens.int()), parts

    def _choose(self, verified: Verified) -> DraftedStep | None:
        """Positions of the tracked requests, as many as a step may take."""
        logits = verified.logits
        most = MOST_ROWS
        if crosses_raw(logits):
            both = 1 + (verified.q is not None)
            row_bytes = logits.shape[-1] * max(4, logits.element_size()) * both
            most = self.child.ring.capacity // STEP_PART // row_bytes
        handles, counts, spans, begin = [], [], [], 0
        temperatures: list[float] = []
        for req_id, count in zip(verified.req_ids, verified.counts):
            tracked = self.tracked.get(req_id)
            if count and tracked is not None and len(temperatures) + count <= most:
                handles.append(tracked.handle)
                counts.append(count)
                temperatures += [tracked.temperature] * count
                spans.append((begin, begin + count))
            begin += count
        if not handles:
            return None
        is_all = len(temperatures) == begin
        parts = [(0, begin)] if is_all else spans
        at = torch.from_numpy(np.concatenate([np.arange(*part) for part in parts]))
        return DraftedStep(handles, counts, temperatures, at.to(logits.device), is_all)

    def _copy_raw(self, verified: Verified, drafted: DraftedStep, meta: StepMeta) -> None:
        """Straight into the ring, without a copy in between."""
        logits, n, width = verified.logits, len(drafted.at), verified.logits.shape[-1]
        words = np.dtype("f4" if logits.element_size() == 4 else "u2")
        meta = meta._replace(dtype=str(logits.dtype).removeprefix("torch."))
        # Of a slice nothing is copied in between.
        chosen = slice(None) if drafted.is_all else drafted.at
        head = [
            meta_array(meta), _ints(drafted.handles), _ints(drafted.counts),
            verified.drafted[chosen].int().numpy(),
        ]  # fmt: skip
        specs = [Spec(array.dtype, array.shape) for array in head]
        q_shape = (0, 0) if verified.q is None else (n, width)
        specs += [Spec(words, (n, width)), Spec(np.dtype("f4"), q_shape)]
        with self._lock:
            places = begin(self.child.ring, MessageKind.POSITIONS, self.step, specs)
            if places is None:
                self.text_only += 1
                return
            for place, array in zip(places, head):
                place[...] = array
            out = torch.from_numpy(places[4]).view(logits.dtype)
            torch.index_select(logits, 0, verified.rows[chosen], out=out)
            if verified.q is not None:
                torch.from_numpy(places[5]).copy_(verified.q(chosen))
            self.child.ring.commit()

    def _after(self, output: Any) -> None:
        step, reduced, self._reduced = self.step, self._reduced, None
        fetch = getattr(output, "get_output", None)
        if fetch is None:
            self._tokens(step, reduced, output)
            return

        def fetched() -> Any:
            # The tokens were on their way from the device until now.
            result = fetch()
            self._safely(lambda given: self._tokens(step, reduced, given), result)
            return result

        output.get_output = fetched

    def _tokens(self, step: int, reduced: Any, result: Any) -> None:
        sampled = getattr(result, "sampled_token_ids", None)
        if not sampled:
            return
        handles, counts, tokens, req_ids = [], [], [], []
        for req_id, own in zip(result.req_ids, sampled):
            self.tokens += len(own)
            tracked = self.tracked.get(req_id)
            if tracked is not None and len(own):
                req_ids.append(req_id)
                handles.append(tracked.handle)
                counts.append(len(own))
                tokens.extend(own)
        if not handles:
            return
        if reduced is not None:
            self._send_reduced(step, *reduced)
        if not self._send(MessageKind.TOKENS, step, [_ints(handles), _ints(counts), _ints(tokens)]):
            self._drop(req_ids)

    def _send_reduced(
        self, step: int, meta: StepMeta, drafted: DraftedStep, tokens: Any, parts: list[Reduced]
    ) -> None:
        arrays = [meta_array(meta), _ints(drafted.handles), _ints(drafted.counts), tokens().numpy()]
        for part in parts:
            arrays += ProbArrays.joined([made() for made in part]).columns
        if not self._send(MessageKind.POSITIONS, step, arrays):
            self.text_only += 1

    def _send(self, kind: MessageKind, number: int, arrays: Sequence[np.ndarray]) -> bool:
        with self._lock:
            return send(self.child.ring, kind, number, arrays)


def reduced(
    rows: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    temperatures: Sequence[float] | None = None,
) -> Reduced:
    """The likeliest of each row, found where the logits are and on their way to the host.

    Args:
        rows: logits [m, V] at a choice [m] of the n positions.
        tokens: [n] drafted ids.
    """
    made, places = [], torch.arange(len(tokens), device=tokens.device)
    for begin_at in range(0, len(tokens), CHUNK):
        chunk = slice(begin_at, begin_at + CHUNK)
        spread = None if temperatures is None else temperatures[chunk]
        made.append(late_arrays(rows(places[chunk]), tokens[chunk], spread))
    return made


def crosses_raw(logits: torch.Tensor) -> bool:
    """True on a CPU, where copying a row costs a hundredth of finding its likeliest tokens."""
    return reads_freely(logits.device)


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


# Below it vLLM samples greedily.
GREEDY = 1e-5
# Sampling parameters beside temperature, top-k, top-p and min-p that change a distribution, with
# the value that does not.
ADJUSTING = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
}


@dataclass(frozen=True)
class Tracked:
    """A request that is recorded."""

    handle: int
    temperature: float


def adjusts(params: Any, kind: str) -> bool:
    """True where a request is sampled from another distribution than its four numbers describe. The
    first runner's verification leaves min-p out."""
    changed = any(
        getattr(params, name, plain) not in (plain, None, [], {})
        for name, plain in ADJUSTING.items()
    )
    return changed or (kind == "first" and params.min_p > GREEDY)


def is_recordable(new: Any) -> bool:
    """False for what a record cannot hold: pooling, embeddings in place of tokens, images, an
    adapter (another target), and answers that end by their own repetitions."""
    return bool(
        new.prompt_token_ids is not None
        and new.sampling_params is not None
        and getattr(new, "prompt_embeds", None) is None
        and not getattr(new, "mm_features", None)
        and getattr(new, "lora_request", None) is None
        and getattr(new.sampling_params, "repetition_detection", None) is None
    )


def meta_of(new: Any, share: float, kind: str, max_length: int) -> RequestMeta:
    """Properties of a new request, as the scheduler sends it to its workers."""
    params = new.sampling_params
    temperature = 0.0 if params.temperature < GREEDY else float(params.temperature)
    eos = getattr(params, "eos_token_id", None)
    return RequestMeta(
        id=new.req_id,
        request_class=request_options(params.extra_args).request_class,
        share=share,
        temperature=temperature,
        top_k=max(0, params.top_k),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        seeded=params.seed is not None and temperature > 0,
        adjusts=adjusts(params, kind),
        max_tokens=max_length if params.max_tokens is None else params.max_tokens,
        stops=[*([] if eos is None else [eos]), *(params.stop_token_ids or ())],
    )


class Chooser:
    """Choice of the requests that are recorded, each whole. Draws of its own: the engine's random
    numbers stay as they are."""

    def __init__(self, most: float, seed: int | None = None):
        self.most, self._draws = most, random.Random(seed)

    def share(self, params: Any, room: float) -> float:
        """Chance with which a request is recorded, where it is; else 0. It is the request's own,
        else the engine's `most`, as much lower as the writer has lowered that (`room`)."""
        options = request_options(getattr(params, "extra_args", None))
        lowered = min(1.0, room / self.most) if self.most > 0 else 0.0
        share = (self.most if options.share is None else options.share) * lowered
        is_chosen = self._draws.random() < share
        return share if is_chosen and options.record else 0.0
