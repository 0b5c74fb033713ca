"""One request and its answer, copied on their way, the choice and the records of those that are
recorded, and the counts of what was observed."""

from __future__ import annotations

import json
import logging
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from draftsmith.chat_answers import ChatAnswers
from draftsmith.client import bearer
from draftsmith.fleet.config import ObserveConfig
from draftsmith.fleet.engine import FALSE, EngineRequestOptions, request_options
from draftsmith.fleet.observe.endpoints import ENDPOINTS, Completions, ObservedAnswer, read_answer
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
# Answers that wait; beyond it the newest are dropped.
MOST_WAITING = 256
CLOSE_S = 10.0
AGAIN_S = 60.0  # until a list of models is read again
TIMEOUT_S = 10.0
LEARN_HEADER = b"x-draftsmith-learn"  # as `draftsmith serve` has it
# Longer answers are passed on alone.
MOST_BYTES = 32 << 20
PREFIX = "draftsmith_observed_"


class Observer:
    """Chooses the exchanges to record, and puts the records of those that are whole into `sink`, on
    a thread of its own. `form` is of the target's tokenizer."""

    def __init__(
        self,
        config: ObserveConfig,
        counters: ProxyCounters,
        sink: RecordSink,
        models: Models,
        form: ChatAnswers | None,
    ):
        self.config, self.counters, self.sink = config, counters, sink
        self.models, self.form = models, form
        self._random = random.Random()
        self._queue: queue.Queue[Exchange | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="observe-recorder", daemon=True)
        self._thread.start()

    def exchange(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> Exchange | None:
        """None where nothing is to be read."""
        endpoint = ENDPOINTS.get(path)
        if endpoint is None or method != "POST":
            return None
        self.counters.requests += 1
        learn = next((value for name, value in headers if name == LEARN_HEADER), b"on")
        if learn.decode("latin-1").strip().lower() in FALSE:
            self.counters.leave_out("by the client")
            return None
        return Exchange(endpoint, self)

    def chosen_share(self, options: EngineRequestOptions) -> float | None:
        """Chance by which a request with these options is recorded; None where it is not."""
        if not options.record:
            self.counters.leave_out("by the client")
            return None
        given = self.config.share if options.share is None else options.share
        share = min(self.sink.share, given)
        if self._random.random() >= share:
            self.counters.leave_out("by share")
            return None
        return share

    def put(self, exchange: Exchange) -> None:
        """A whole exchange; waits for nothing."""
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
                # Answers are foreign data; none of them may end the recording of others.
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
        for record in records_of(tokens, steps, head, adjusts=sampling.adjusts):
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


class Exchange:
    """One request whose answer is read as it passes."""

    def __init__(self, endpoint: Completions, observer: Observer):
        self.endpoint, self.observer = endpoint, observer
        self.share = 0.0
        self.request_class = ""
        self.request: dict[str, Any] = {}
        self.answer = bytearray()
        self.is_stream = False
        self.status = 0
        self.coding = "identity"
        self._is_wanted = False
        self._is_over = False

    def begin(self, body: bytes) -> None:
        """Reads a request."""
        try:
            self._begin(json.loads(body))
        except Exception:
            # Whatever a client sends is the server's to refuse.
            self._is_wanted = False

    def _begin(self, request: Any) -> None:
        if not isinstance(request, dict):
            return
        self.request = request
        extra = request.get("vllm_xargs")
        options = request_options(extra if isinstance(extra, dict) else None)
        share = self.observer.chosen_share(options)
        if share is None:
            return
        self.share, self._is_wanted = share, True
        self.request_class = options.request_class or str(request.get("request_class") or "")

    def answer_begins(self, status: int, headers: httpx.Headers) -> None:
        self.status = status
        self.is_stream = "text/event-stream" in headers.get("content-type", "")
        self.coding = headers.get("content-encoding", "identity")

    def seen(self, piece: bytes) -> None:
        """A piece of the answer as the server sent it."""
        if self._is_wanted and len(self.answer) <= MOST_BYTES:
            self.answer += piece

    def end(self) -> None:
        """The answer is whole."""
        self._is_over = True
        counters = self.observer.counters
        if not self._is_wanted:
            return
        if self.status != 200:
            counters.leave_out("without an answer")
        elif self.coding != "identity":
            counters.leave_out("compressed")
        elif len(self.answer) > MOST_BYTES:
            counters.leave_out("too long")
        else:
            self.observer.put(self)

    def close(self) -> None:
        if self._is_wanted and not self._is_over:
            self.observer.counters.leave_out("broken off")


@dataclass(eq=False)  # a registry keeps its collectors by their hash
class ProxyCounters(Collector):
    requests: int = 0  # of the generating endpoints
    answers: int = 0  # recorded
    tokens: int = 0  # of recorded answers
    drafted: int = 0  # tokens, as the server counts them
    accepted: int = 0
    with_steps: int = 0  # answers whose rounds are known
    dropped: int = 0  # answers that recording was too slow for
    left_out: Counter[str] = field(default_factory=Counter)  # answers, by reason

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] += 1

    def line(self) -> str:
        drafted = f", acceptance {self.accepted / self.drafted:.3f}" if self.drafted else ""
        return (
            f"{self.requests} requests, {self.answers} recorded ({self.with_steps} with their "
            f"rounds), {self.left_out.total()} left out, {self.dropped} dropped{drafted}"
        )

    def collect(self) -> Iterator[Metric]:
        for name, value in vars(self).items():
            if isinstance(value, int):
                yield CounterMetricFamily(PREFIX + name, name.replace("_", " "), value=value)
        family = CounterMetricFamily(
            PREFIX + "left_out", "answers that are not recorded", labels=["reason"]
        )
        for reason, count in dict(self.left_out).items():
            family.add_metric([reason], count)
        yield family


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
