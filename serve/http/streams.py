"""The engine requests of one HTTP request: submitted together, their updates in one inbox,
cancelled together; threads around the event loop, whose updates reach it in one wake-up; and the
report on drafted and accepted tokens, under vLLM's field names and ours."""

from __future__ import annotations

import asyncio
import bisect
import copy
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from draftsmith.kernels.dispatch import use_device
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.http.limits import Arrival
from draftsmith.serve.requests.request import (
    OnUpdate,
    Request,
    RequestOptions,
    SpeculationStats,
    Update,
)
from draftsmith.serve.sampling.params import SamplingParams

T = TypeVar("T")
LANES = (2**16, 2**20)  # bytes from which a body is in the next lane
NUM_COMPILING = 8  # grammars at a time
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# Line ends to Unicode but not to server-sent events. Many a client (all on httpx's iter_lines) cuts
# an event in two there.
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
Level = Literal["none", "summary", "detailed"]


class StreamEvent(NamedTuple):
    index: int  # type: ignore[assignment]  # in place of the tuple's method
    request: Request
    update: Update


class RequestStreams:
    """Until the end of the time that `arrival` gives. Without `every_round` there are events of the
    requests' ends alone."""

    def __init__(
        self,
        loop: EngineLoop,
        intake: Intake,
        bridge: ThreadBridge[StreamEvent],
        arrival: Arrival,
        *,
        every_round: bool = True,
    ):
        self.loop, self._intake, self._bridge, self._arrival = loop, intake, bridge, arrival
        self.requests: list[Request] = []
        self._every_round = every_round
        self._events: Inbox[StreamEvent] = Inbox()

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        options: RequestOptions,
    ) -> None:
        """Submit one engine request per (prompt, params) pair; when one is refused none
        is taken."""
        inputs = self.loop.engine.inputs

        def request(index: int, prompt: Sequence[int], choice: SamplingParams) -> Request:
            forward = self._forwarder(index)
            return inputs.request(prompt, choice, forward, options)

        def make() -> list[Request]:
            return [
                request(index, prompt, choice)
                for index, (prompt, choice) in enumerate(zip(prompts, params, strict=True))
            ]

        if any(inputs.waits_for_grammar(choice) for choice in params):
            made = self._intake.compile(make)
        else:
            made = self._intake.run(make, self._arrival.num_bytes)
        requests = await self._arrival.within(made)
        # Back on the event loop's thread: a task that is cancelled while it waits has nothing in
        # the engine yet.
        self.loop.enqueue(requests)
        self.requests = requests

    def _forwarder(self, index: int) -> OnUpdate:
        def forward(request: Request, update: Update) -> None:
            # The event loop is woken up for what it sends.
            if self._every_round or update.finish_reason is not None:
                self._bridge.put(self._events, StreamEvent(index, request, update))

        return forward

    async def rounds(self) -> AsyncIterator[list[StreamEvent]]:
        """Events that came together, in order, until every request has finished; leaving early
        cancels the rest."""
        unfinished = len(self.requests)
        try:
            while unfinished:
                events = await self._arrival.within(self._events.take())
                unfinished -= sum(event.update.finish_reason is not None for event in events)
                yield events
        finally:
            self.cancel()

    async def finished(self) -> list[Request]:
        async for _ in self.rounds():
            pass
        return self.requests

    def cancel(self) -> None:
        for request in self.requests:
            if not request.finished:
                self.loop.cancel(request)


class Inbox(Generic[T]):
    """Items for one task of the event loop, which takes all that are there. Every call is made on
    the loop's thread."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[T]:
        """At least one item; waits for it."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        return items


class ThreadBridge(Generic[T]):
    """Items from any thread to inboxes of one event loop, many items per wake-up. A wake-up costs
    more than its item: system calls, and the two threads take Python's lock from each other in the
    middle of a round."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[Inbox[T], T]] = deque()
        self._woken = False

    def put(self, reader: Inbox[T], item: T) -> None:
        """Callable from any thread."""
        # The client's event loop may be gone while the engine still finishes a round.
        if self._loop.is_closed():
            return
        self._items.append((reader, item))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Before anything is taken out: an item that comes in from here on wakes the loop again.
        self._woken = False
        while self._items:
            reader, item = self._items.popleft()
            reader.put(item)


class Intake:
    """Threads that make requests of bodies. What a body brings is tokenized in order among bodies
    of its size, and grammars that are new are compiled apart: no large body, and no grammar, keeps
    a small one waiting. A request's own logits processors are tried there too, on `device`."""

    def __init__(
        self, tokenizer: Any, spare: Any = None, device: torch.device | str = "cpu"
    ) -> None:
        """`spare` is copied for further threads; no thread encodes with it."""
        self._spare, self._own = spare, threading.local()

        def begin(own: Any = None) -> None:
            use_device(device)
            if own is not None:
                self._own.tokenizer = own

        def threads(count: int, own: Any = None) -> ThreadPoolExecutor:
            name = "draftsmith-intake"
            return ThreadPoolExecutor(count, name, initializer=begin, initargs=(own,))

        self._lanes = [threads(1, tokenizer), *(threads(1) for _ in LANES)]
        self._compiling = threads(NUM_COMPILING)

    @property
    def tokenizer(self) -> Any:
        """The calling thread's own: encoding sets options of a tokenizer, and none is used by two
        threads meanwhile."""
        if not hasattr(self._own, "tokenizer"):
            self._own.tokenizer = copy.deepcopy(self._spare)
        return self._own.tokenizer

    async def run(self, work: Callable[[], T], num_bytes: int = 0) -> T:
        """`work` on a body of this size."""
        return await _result(self._lanes[bisect.bisect(LANES, num_bytes)], work)

    async def compile(self, work: Callable[[], T]) -> T:
        """`work` that waits for a grammar."""
        return await _result(self._compiling, work)


async def _result(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def encoded(value: Any) -> str:
    """JSON that no client takes for the end of a line."""
    text = _encode(value)
    return text if text.isascii() else text.translate(LINE_ENDS)


def sent_event(body: dict[str, Any], name: str = "") -> str:
    """A body as a server-sent event, with a name or without."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {encoded(body)}\n\n"


def speculation_report(stats: SpeculationStats, k: int, *, level: Level) -> dict[str, Any]:
    """Report with vLLM's fields, and with `tau` (of the rounds that drafted), the committed tokens
    and all target passes.

    `k` is the draft length that the request was to have; a round may offer fewer tokens, or more
    where it is chosen. "detailed" adds numbers of every round.
    """
    # Clients hold the histogram's length against this number, and a round may go deeper than asked
    # for.
    deepest = max([k, *stats.offered])
    drafts, offered, accepted = len(stats.offered), sum(stats.offered), sum(stats.accepted)
    body: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
        "draft_acceptance_rate": accepted / offered if offered else 0.0,
        "acceptance_histogram": histogram(stats.accepted, deepest),
        "acceptance_histogram_by_draft_length": by_draft_length(stats),
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": offered,
        "num_spec_tokens": deepest,
        "num_target_passes": stats.num_passes,
        "num_committed_tokens": stats.num_committed,
        "tau": stats.tau,
    }
    if level == "detailed":
        body["per_step_accepted"] = stats.accepted
        body["per_step_drafted"] = stats.offered
        body["per_step_committed"] = stats.committed
        body["per_step_begin"] = stats.begins
    return body


def drafting_state(answer: str, requests: Sequence[Request]) -> dict[str, Any]:
    """Drafting of an answer that is being made, one entry per choice."""
    return {
        "id": answer,
        "object": "speculation",
        "choices": [
            {
                "k": request.k,
                "drafting": request.drafting,
                **speculation_report(request.speculation, request.k, level="summary"),
            }
            for request in requests
        ],
    }


def histogram(accepted: Sequence[int], deepest: int) -> list[int]:
    """Numbers of rounds that accepted 0, 1, ..., `deepest` tokens."""
    return [accepted.count(count) for count in range(deepest + 1)]


def by_draft_length(stats: SpeculationStats) -> dict[str, list[int]]:
    """Histogram of the rounds of each draft length: short drafts cannot be accepted far, which one
    histogram would hide."""
    groups: dict[int, list[int]] = {}
    for offered, accepted in zip(stats.offered, stats.accepted, strict=True):
        groups.setdefault(offered, []).append(accepted)
    return {str(length): histogram(group, length) for length, group in sorted(groups.items())}
