from __future__ import annotations

import asyncio
import threading

from draftsmith.serve.http.streams import Inbox, ThreadBridge


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
