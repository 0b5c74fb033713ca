from __future__ import annotations

import asyncio
from typing import Any

from draftsmith.serve.http.limits import RequestLimits, ServerLimits, ServerLoad

SCOPE = {"type": "http", "method": "GET", "path": "/v1/completions", "headers": []}


async def whole_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b""}


def test_an_answer_that_nobody_reads_gives_its_place_back() -> None:
    async def answering(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"x"})

    async def unread(message: Any) -> None:
        await asyncio.Event().wait()

    load = ServerLoad()
    limits = ServerLimits(max_concurrency=1, timeout_s=0.05, unread_s=0.05)
    app = RequestLimits(answering, limits, load, lambda status: None)

    async def ask() -> None:
        begun = asyncio.ensure_future(app(dict(SCOPE), whole_body, unread))
        await asyncio.sleep(0.01)
        assert load.num_answering == 1
        await asyncio.wait_for(begun, 10)

    asyncio.run(ask())
    assert load.num_answering == 0
