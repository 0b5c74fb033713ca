"""Requests over kept connections, which a server may close just as the next request leaves.

llama-server does so now and then after a stream. Such a request is sent again, as long as the
connection was an old one; a request on a new connection is sent once. Send only requests that may
be carried out twice, as completions may."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

CLOSED = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
MOST_TRIES = 4


class Connection:
    """The connection of one try: whether it was opened for it (httpcore's trace)."""

    def __init__(self) -> None:
        self.is_new = False

    def saw(self, event: str, info: Any) -> None:
        self.is_new |= event.startswith("connection.connect")

    async def saw_async(self, event: str, info: Any) -> None:
        self.saw(event, info)


def send(
    send_once: Callable[[httpx.Request], httpx.Response], request: httpx.Request
) -> httpx.Response:
    """Response to a request whose body is in memory.

    Raises:
        httpx.HTTPError: as `send_once` does, of the last try.
    """
    for _ in range(MOST_TRIES - 1):
        connection = Connection()
        request.extensions["trace"] = connection.saw
        try:
            return send_once(request)
        except CLOSED:
            if connection.is_new:
                raise
    return send_once(request)


async def send_async(
    send_once: Callable[[httpx.Request], Awaitable[httpx.Response]], request: httpx.Request
) -> httpx.Response:
    """As `send`, for an asynchronous client."""
    for _ in range(MOST_TRIES - 1):
        connection = Connection()
        request.extensions["trace"] = connection.saw_async
        try:
            return await send_once(request)
        except CLOSED:
            if connection.is_new:
                raise
    return await send_once(request)
