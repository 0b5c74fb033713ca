from __future__ import annotations

import asyncio
from typing import Any

import pytest

from draftsmith.serve.config import HttpOptions
from draftsmith.serve.http import limits
from draftsmith.serve.http.limits import RequestLimits, ServerLoad

SCOPE = {"type": "http", "method": "GET", "path": "/v1/completions", "headers": []}


async def whole_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b""}


def test_an_answer_that_nobody_reads_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNREAD_S", 0.05)

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"x"})

    async def unread(message: Any) -> None:
        await asyncio.Event().wait()

    load = ServerLoad()
    http = HttpOptions(max_concurrency=1, request_timeout_s=0.05)
    app = RequestLimits(answering, http, (), load, lambda status: None)

    async def ask() -> None:
        begun = asyncio.ensure_future(app(dict(SCOPE), whole_body, unread))
        await asyncio.sleep(0.01)
        assert load.num_answering == 1
        await asyncio.wait_for(begun, 10)

    asyncio.run(ask())
    assert load.num_answering == 0
