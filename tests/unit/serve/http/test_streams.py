"""Updates on their way from the engine's thread to the server's."""

from __future__ import annotations

import asyncio
import threading

from draftsmith.serve.http.streams import Inbox, ThreadBridge


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
