"""Gives the engine a thread of its own. Everything here but `_run` may be called from
any thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import NamedTuple, TypeVar

from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import use_device
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.live_draft import Swap, SwapLate
from draftsmith.serve.engine.scheduler import QueueFull
from draftsmith.serve.requests.request import (
    DEFAULT_OPTIONS,
    FinishReason,
    OnUpdate,
    Request,
    RequestOptions,
    Update,
)
from draftsmith.serve.sampling.params import SamplingParams

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MOST_FAILURES = 3  # rounds in a row that may raise before the engine is given up
MOST_LONE_FAILURES = 8  # see `LoneFailures`


class Action(NamedTuple):
    """A call on the engine's thread between two rounds; `request` is ended with an error should it
    fail."""

    act: Callable[[], None]
    request: Request | None = None


class ShuttingDown(QueueFull):
    """Coming back later does not help: this server is about to end."""


class EngineDead(UserError):
    """Coming back later does not help: the engine failed for good and the server has to be started
    again."""


class EngineLoop:
    """Rounds run while there is work; between two rounds the inbox is emptied. Callbacks run on the
    engine's thread.

    A failure ends no more than it has to. A callback that raises, or an error that only one request
    can have met (`sampling/state.py`), ends that request. An action ends the request it is about,
    any other failure of a round the requests in it. The engine ends after `MOST_FAILURES` of these
    in a row, after `MOST_LONE_FAILURES` rounds in which every request failed alone, and by whatever
    else escapes: all requests end with an error, and no more are taken.
    """

    def __init__(self, engine: EngineCore):
        self.engine = engine
        self.failures = 0  # rounds in a row that raised
        self._inbox: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._arriving = 0
        # of `_arriving`, `_closing` and `_ended`; what it lets in is in the inbox before it opens
        self._lock = threading.Lock()
        self._closing = False
        self._stopped = False
        self._ended = False  # the thread takes nothing more
        self._thread = threading.Thread(target=self._run, name="draftsmith-engine", daemon=True)

    def start(self) -> EngineLoop:
        self._thread.start()
        return self

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and not self._ended

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_update: OnUpdate | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> Request:
        """Queue a request; raises for a bad one and a full queue, on the caller's thread."""
        request = self.engine.inputs.request(prompt_ids, params, on_update, options)
        self.enqueue([request])
        return request

    def enqueue(self, requests: Sequence[Request]) -> None:
        """All of them or, when the queue has no room for all, none."""
        limit = self.engine.config.max_queue
        with self._lock:
            if self._closing:
                raise ShuttingDown("the server is shutting down; send the request to another one")
            if self._ended:
                raise EngineDead(
                    "the engine failed and takes no more requests; restart the server, whose log "
                    "says why"
                )
            waiting = self._arriving + len(self.engine.scheduler.waiting)
            if waiting + len(requests) > limit:
                raise QueueFull(
                    f"{waiting} requests are waiting already and this server holds {limit}; try "
                    "again later"
                )
            self._arriving += len(requests)
            for request in requests:
                if request.on_update is not None:
                    request.on_update = self._guarded(request.on_update)
                self._inbox.put(Action(partial(self._admit, request), request))

    def cancel(self, request: Request) -> None:
        self._inbox.put(Action(partial(self.engine.cancel, request), request))

    def set_k(self, request: Request, k: int) -> None:
        self.engine.check_k(request, k)
        self._inbox.put(Action(partial(self.engine.set_k, request, k), request))

    def ask(self, act: Callable[[], Result], *, timeout_s: float = 60.0) -> Result:
        """Result of a call on the engine's thread between two rounds. Raises what it raises."""
        answer: Future[Result] = Future()
        with self._lock:
            if self._ended:
                raise EngineDead("the engine has stopped; restart the server, whose log says why")
            self._inbox.put(Action(partial(_resolve, answer, act)))
        try:
            return answer.result(timeout_s)
        except FutureTimeout:
            raise EngineDead(
                f"the engine did not come to it within {timeout_s:g} s; it is stuck"
            ) from None

    def swap(self, folder: str, version: str, *, timeout_s: float = 60.0) -> Swap:
        """Load a version on this thread and wait until the engine serves with it. A swap that was
        given up is never applied."""
        if self._ended:
            raise SwapLate(f"version {version} cannot be swapped in; the engine has stopped")
        swap = self.engine.draft.prepare(folder, version)
        self._inbox.put(Action(_wake_up))
        wait([swap.applied], timeout_s)
        # Given up only before the engine has begun it; from then on only a copy remains.
        if given_up := swap.applied.cancel():
            swap.pairs.clear()
        if given_up or not wait([swap.applied], timeout_s).done:
            raise SwapLate(
                f"version {version} was not swapped in within {timeout_s:g} s; the engine is "
                "stuck or stopped"
            )
        swap.applied.result()
        return swap

    def quarantine(self) -> None:
        """Let the draft draft seldom until another version is swapped in."""
        self.engine.draft.quarantined = True

    def close(self, drain_s: float = 0.0) -> None:
        """No new requests; those running get `drain_s` to finish, then they are aborted."""
        with self._lock:
            self._closing = True
        deadline_s = time.monotonic() + drain_s
        while (
            (self._arriving or self.engine.scheduler.busy)
            and time.monotonic() < deadline_s
            and self._thread.is_alive()
        ):
            time.sleep(0.01)
        self._inbox.put(Action(self._stop))
        self._thread.join()

    def _admit(self, request: Request) -> None:
        with self._lock:
            self._arriving -= 1
            self.engine.scheduler.waiting.append(request)
        self.engine.recorder.begin(request)

    def _stop(self) -> None:
        self._stopped = True

    def _guarded(self, on_update: OnUpdate) -> OnUpdate:
        """A reader that fails (its event loop is closed, say) loses its own request, not the round
        of all others."""

        def update(request: Request, update: Update) -> None:
            try:
                on_update(request, update)
            except Exception:
                log.exception(
                    "the reader of request %s failed; the request is cancelled", request.id
                )
                request.on_update = None
                self.cancel(request)

        return update

    def _run(self) -> None:
        try:
            use_device(self.engine.target.device)
            while not self._stopped:
                self._take(block=not self.engine.busy)
                if not self._stopped:
                    self._round()
        except BaseException:
            # The thread's end: whatever it was, every reader that waits for an answer gets its end.
            log.critical("the engine failed for good; restart the server", exc_info=True)
        finally:
            self._end(FinishReason.ABORT if self._stopped else FinishReason.ERROR)

    def _round(self) -> None:
        try:
            self.engine.step()
            self.failures = 0
        except Exception as error:
            # Out of memory, say.
            log.exception("a round failed; the requests in it are ended with an error")
            self.failures += 1
            if self.failures == MOST_FAILURES:
                raise RuntimeError(f"{MOST_FAILURES} rounds in a row failed") from error
            for request in self._in_round():
                self._finish(request, FinishReason.ERROR)
        lone = self.engine.committer.failures
        lone.end_round()
        if lone.rounds == MOST_LONE_FAILURES:
            raise RuntimeError(f"all requests of {lone.rounds} rounds in a row failed, each alone")

    def _in_round(self) -> list[Request]:
        scheduler = self.engine.scheduler
        if scheduler.running or not scheduler.waiting:
            return list(scheduler.running)
        # No request was in: it failed on the one that was to be admitted, and would again.
        return [scheduler.waiting.head()]

    def _take(self, *, block: bool) -> None:
        if block:
            self._act(self._inbox.get())
        while not self._stopped and not self._inbox.empty():
            self._act(self._inbox.get())

    def _act(self, action: Action) -> None:
        try:
            action.act()
        except Exception:
            log.exception("an action on the engine failed")
            if action.request is not None:
                self._finish(action.request, FinishReason.ERROR)

    def _end(self, reason: FinishReason) -> None:
        with self._lock:
            self._ended = True
        # Nothing arrives from here on; what arrived before is ended like the rest.
        while not self._inbox.empty():
            self._act(self._inbox.get())
        scheduler = self.engine.scheduler
        for request in [*scheduler.running, *scheduler.waiting]:
            self._finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request; its reader gets the end even where the request cannot be put away."""
        try:
            self.engine.cancel(request, reason)
        except Exception:
            log.exception("request %s could not be put away", request.id)
            request.finish_reason = reason
            if request.on_update is not None:
                request.on_update(request, Update([], "", [], reason))
            if not self._ended:
                # It may be left in the batch, which must not go on like that.
                raise


def _resolve(answer: Future[Result], act: Callable[[], Result]) -> None:
    try:
        answer.set_result(act())
    except Exception as error:
        answer.set_exception(error)


def _wake_up() -> None:
    """An idle engine looks for a swap only after something came in."""
