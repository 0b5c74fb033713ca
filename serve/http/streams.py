"""The engine requests of one HTTP request: submitted together, their updates in one inbox,
cancelled together."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.http.limits import Arrival
from draftsmith.serve.http.threads import Inbox, Intake, ThreadBridge
from draftsmith.serve.requests.request import OnUpdate, Request, RequestOptions, Update
from draftsmith.serve.sampling.params import SamplingParams


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


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# Line ends to Unicode but not to server-sent events. Many a client (all on httpx's iter_lines) cuts
# an event in two there.
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def encoded(value: Any) -> str:
    """JSON that no client takes for the end of a line."""
    text = _encode(value)
    return text if text.isascii() else text.translate(LINE_ENDS)


def sent_event(body: dict[str, Any], name: str = "") -> str:
    """A body as a server-sent event, with a name or without."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {encoded(body)}\n\n"
