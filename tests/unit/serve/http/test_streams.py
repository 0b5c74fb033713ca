"""Events of an HTTP request's engine requests: of every round for a stream, of their ends for an
answer in one piece."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from draftsmith.serve.http.limits import Arrival
from draftsmith.serve.http.streams import Inbox, Intake, RequestStreams, ThreadBridge
from draftsmith.serve.requests.request import FinishReason, RequestOptions, Update
from draftsmith.serve.sampling.params import SamplingParams


def request_of(prompt, params, on_update, options) -> SimpleNamespace:
    return SimpleNamespace(on_update=on_update, finished=True)


def enqueue(requests) -> None:
    """Gives each request three updates, of which the last one ends it."""
    for request in requests:
        for reason in (None, None, FinishReason.LENGTH):
            request.on_update(request, Update([1], "x", [], reason))


@pytest.mark.parametrize(("every_round", "count"), [(True, 3), (False, 1)])
def test_an_answer_in_one_piece_has_events_of_its_ends_alone(every_round, count) -> None:
    loop = SimpleNamespace(
        engine=SimpleNamespace(
            inputs=SimpleNamespace(request=request_of, waits_for_grammar=lambda params: False)
        ),
        enqueue=enqueue,
    )

    async def events() -> list:
        streams = RequestStreams(
            loop,
            Intake(None),
            ThreadBridge(),
            Arrival(time.monotonic(), 10.0),
            every_round=every_round,
        )
        await streams.submit([[1], [2]], [SamplingParams()] * 2, RequestOptions())
        return [event async for found in streams.rounds() for event in found]

    found = asyncio.run(events())
    assert [event.index for event in found] == [0] * count + [1] * count
    assert [event.update.finish_reason for event in found][count - 1 :: count] == [
        FinishReason.LENGTH
    ] * 2


def test_what_comes_before_the_loop_looks_is_one_call_and_in_order(monkeypatch):
    async def scenario() -> tuple[list[int], list[int], int]:
        loop, calls = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *given: (calls.append(given), call(*given))
        )
        bridge: ThreadBridge[int] = ThreadBridge()
        first, second = Inbox(), Inbox()
        # The loop stands still meanwhile, so it looks once all is there.
        thread = threading.Thread(
            target=lambda: [bridge.put((first, second)[item % 2], item) for item in range(10)]
        )
        thread.start()
        thread.join()
        return await first.take(), await second.take(), len(calls)

    assert asyncio.run(scenario()) == ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9], 1)


def test_nothing_is_lost_while_both_threads_run():
    async def scenario() -> list[int]:
        bridge: ThreadBridge[int] = ThreadBridge()
        reader: Inbox[int] = Inbox()
        thread = threading.Thread(
            target=lambda: [bridge.put(reader, item) for item in range(20_000)]
        )
        thread.start()
        got: list[int] = []
        while len(got) < 20_000:
            got += await asyncio.wait_for(reader.take(), 20)
        thread.join()
        return got

    assert asyncio.run(scenario()) == list(range(20_000))


def test_a_loop_that_is_gone_is_no_failure():
    async def scenario() -> ThreadBridge[int]:
        return ThreadBridge()

    asyncio.run(scenario()).put(Inbox(), 1)


def test_a_reader_that_is_cancelled_while_it_waits_loses_nothing():
    async def scenario() -> list[int]:
        inbox: Inbox[int] = Inbox()
        reader = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        reader.cancel()
        inbox.put(1)
        inbox.put(2)
        return await inbox.take()

    assert asyncio.run(scenario()) == [1, 2]
