"""Records of exchanges, made on a thread of their own: a request never waits for its record."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

import httpx

from draftsmith.chats.answers import ChatAnswers
from draftsmith.client import bearer
from draftsmith.fleet.observe.config import ObserveConfig
from draftsmith.fleet.observe.endpoints import ObservedAnswer, read_answer
from draftsmith.fleet.observe.exchange import Exchange, ProxyCounters
from draftsmith.fleet.observe.rounds import (
    ObservedSampling,
    Unknown,
    records_of,
    sampling_of,
    steps_of,
    tokens_of,
)
from draftsmith.record import RecordHead, RecordSink, hashed

logger = logging.getLogger("draftsmith.observe")

# ChatAnswers that wait; beyond it the newest are dropped.
MOST_WAITING = 256
CLOSE_S = 10.0
AGAIN_S = 60.0  # until a list of models is read again
TIMEOUT_S = 10.0


class ProxyRecorder:
    """Reads exchanges and puts their records into `sink`."""

    def __init__(
        self,
        config: ObserveConfig,
        counters: ProxyCounters,
        sink: RecordSink,
        models: Models,
        form: ChatAnswers | None = None,
    ):
        self.config, self.counters, self.sink = config, counters, sink
        self.models, self.form = models, form
        self._queue: queue.Queue[Exchange | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="observe-recorder", daemon=True)
        self._thread.start()

    def put(self, exchange: Exchange) -> None:
        try:
            self._queue.put_nowait(exchange)
        except queue.Full:
            self.counters.dropped += 1

    def close(self) -> None:
        """Records what waits, and flushes the buffer."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        self.sink.close()

    def _run(self) -> None:
        while (exchange := self._queue.get()) is not None:
            try:
                self.record(exchange)
            except (Unknown, ValueError) as reason:
                known = str(reason) if isinstance(reason, Unknown) else "unreadable"
                self.counters.leave_out(known)
                logger.debug("an answer is left out (%s)", reason)
            except Exception:
                # ChatAnswers are foreign data; none of them may end the recording of others.
                logger.exception("an answer could not be recorded")
                self.counters.leave_out("failed")

    def record(self, exchange: Exchange) -> None:
        """Raises `Unknown` or `ValueError` where the exchange makes no records."""
        request = exchange.request
        answer = read_answer(
            exchange.endpoint, bytes(exchange.answer), is_stream=exchange.is_stream
        )
        if answer.num_choices != 1 or request.get("n", 1) not in (1, None):
            raise Unknown("several choices")
        if request.get("echo") or request.get("prompt_embeds"):
            raise Unknown("texts in parts")
        if not self.models.is_target(answer.model):
            raise Unknown("another model")
        tokens = tokens_of(exchange.endpoint, request, answer, self.form)
        if not tokens.prompt or not tokens.answer:
            raise Unknown("empty")
        sampling = sampling_of(request, self.config.defaults)
        steps = steps_of(answer.report, len(tokens.answer))
        head = self._head(exchange, answer, sampling)
        for record in records_of(tokens, steps, answer.entries, head, adjusts=sampling.adjusts):
            self.sink.put(record)
        self._count(answer, len(tokens.answer), has_steps=steps is not None)

    def _head(
        self, exchange: Exchange, answer: ObservedAnswer, sampling: ObservedSampling
    ) -> RecordHead:
        config = self.config
        return RecordHead(
            request=hashed(f"{answer.id}-0"),
            request_class=exchange.request_class,
            target=config.target or answer.model,
            target_revision=config.target_revision,
            draft_version=config.draft_version,
            sampler=config.sampler,
            engine=config.engine,
            share=exchange.share,
            **sampling.shared,
        )

    def _count(self, answer: ObservedAnswer, num_tokens: int, *, has_steps: bool) -> None:
        counters = self.counters
        counters.answers += 1
        counters.tokens += num_tokens
        counters.drafted += answer.drafted
        counters.accepted += answer.accepted
        counters.with_steps += has_steps
        counters.with_logprobs += bool(answer.entries)


class Models:
    """`name` is the one model to record; None for all that the server lists without a parent, the
    mark of an adapter. The list is read on the recorder's thread."""

    def __init__(self, url: str, name: str | None, *, api_key: str | None = None):
        self.url, self.name = url, name
        self.headers = bearer(api_key)
        self._listed: dict[str, bool] = {}  # True: the target
        self._read_s = -AGAIN_S

    def is_target(self, model: str) -> bool:
        if self.name is not None:
            return model == self.name
        if model not in self._listed and time.monotonic() - self._read_s >= AGAIN_S:
            self._read_s = time.monotonic()
            self._listed = self._read() or self._listed
        return self._listed.get(model, False)

    def _read(self) -> dict[str, bool]:
        try:
            response = httpx.get(f"{self.url}/v1/models", headers=self.headers, timeout=TIMEOUT_S)
            listed: list[dict[str, Any]] = response.json()["data"]
            return {str(one["id"]): not one.get("parent") for one in listed}
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s lists no models (%s); give --model", self.url, error)
            return {}
