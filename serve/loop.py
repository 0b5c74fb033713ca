"""Gives the engine a thread of its own. Everything here but `_run` may be called from any thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from draftsmith.errors import UserError
from draftsmith.serve.engine import Engine
from draftsmith.serve.request import FinishReason, OnUpdate, Request, SamplingParams
from draftsmith.serve.scheduler import QueueFull
from draftsmith.serve.swap import Swap

log = logging.getLogger(__name__)

Action = Callable[[], None]


class ShuttingDown(QueueFull):
    """Coming back later does not help: this server is about to end."""


class EngineLoop:
    """Rounds run while there is work; between two rounds the inbox is emptied. Callbacks run on the engine's thread."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.failures = 0  # rounds in a row that raised
        self._inbox: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._arriving = 0
        self._lock = threading.Lock()
        self._closing = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="draftsmith-engine", daemon=True)

    def start(self) -> EngineLoop:
        self._thread.start()
        return self

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and self.failures < 3

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_update: OnUpdate | None = None,
        *,
        text: bool = True,
        request_class: str = "",
        tenant: str = "",
        learn: bool = True,
    ) -> Request:
        """Refuses bad requests and a full queue here, on the caller's thread."""
        request = self.engine.intake.request(
            prompt_ids, params, on_update, text=text, request_class=request_class, tenant=tenant, learn=learn
        )
        self.enqueue([request])
        return request

    def enqueue(self, requests: Sequence[Request]) -> None:
        """All of them or, when the queue has no room for all, none."""
        limit = self.engine.config.max_queue
        with self._lock:
            if self._closing:
                raise ShuttingDown("the server is shutting down; send the request to another one")
            waiting = self._arriving + len(self.engine.scheduler.waiting)
            if waiting + len(requests) > limit:
                raise QueueFull(f"{waiting} requests are waiting already and this server holds {limit}; try again later")
            self._arriving += len(requests)
        for request in requests:
            self._inbox.put(lambda request=request: self._admit(request))

    def cancel(self, request: Request) -> None:
        self._inbox.put(lambda: self.engine.cancel(request))

    def set_k(self, request: Request, k: int) -> None:
        if k > 0 and self.engine.drafter is None:
            raise UserError(f"k is {k} but there is no drafter; give 0")
        self._inbox.put(lambda: self.engine.set_k(request, k))

    def swap(self, folder: str, version: str, timeout_s: float = 60.0) -> Swap:
        """Loads on this thread, waits until the engine serves with it."""
        swap = self.engine.swap(folder, version)
        self._inbox.put(lambda: None)
        if not swap.done.wait(timeout_s):
            raise UserError(f"version {version} was not swapped in within {timeout_s:g} s; the engine is stuck or stopped")
        return swap

    def close(self, drain_s: float = 0.0) -> None:
        """No new requests; those running get `drain_s` to finish, then they are aborted."""
        with self._lock:
            self._closing = True
        deadline_s = time.monotonic() + drain_s
        while (self._arriving or self.engine.scheduler.busy) and time.monotonic() < deadline_s and self._thread.is_alive():
            time.sleep(0.01)
        self._inbox.put(self._stop)
        self._thread.join()

    def _admit(self, request: Request) -> None:
        with self._lock:
            self._arriving -= 1
        self.engine.scheduler.waiting.append(request)

    def _stop(self) -> None:
        self._stopped = True
        self._abort_all(FinishReason.ABORT)

    def _run(self) -> None:
        while not self._stopped:
            self._take(block=not self.engine.busy)
            if self._stopped:
                return
            try:
                self.engine.step()
                self.failures = 0
            except Exception:
                # A round that fails (out of memory, say) ends the requests in it, not the server.
                log.exception("a round failed; its requests are ended with an error")
                self.failures += 1
                self._abort_all(FinishReason.ERROR)

    def _take(self, *, block: bool) -> None:
        if block:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _abort_all(self, reason: FinishReason) -> None:
        scheduler = self.engine.scheduler
        for request in [*scheduler.running, *scheduler.waiting]:
            self.engine.cancel(request, reason)
