"""The reverse proxy: an ASGI application that hands every request to one server and every byte of
its answer back as it comes.

Status, headers (but those of a single connection) and body pass unchanged, in both directions and
for every path. A client's disconnect ends the request at the server, and an answer that the server
breaks off is broken off for the client. What is read on the way is a copy.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable

import httpx
from starlette.types import Message, Receive, Scope, Send

from draftsmith.client import send_async
from draftsmith.fleet.observe.exchange import Exchange, Observer

CONNECT_S = 10.0
# Servers on uvicorn drop an idle connection after 5 s: a pooled one must go before.
IDLE_S = 3.0
# Sent again where the server closed the connection under them; requests that are read are, too.
REPEATABLE = ("GET", "HEAD", "OPTIONS")
# A longer request is handed on unread.
MOST_BYTES = 16 << 20
Headers = list[tuple[bytes, bytes]]
LENGTHS = (b"content-length", b"transfer-encoding")
# Of one connection (RFC 9110 7.6.1); `expect` was answered when its body was read.
OF_CONNECTION = frozenset(
    {
        b"connection", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip


class Disconnected(Exception):
    """The client's connection ended within its request."""


class RequestUpload:
    """Body of a client's request, by piece, and the end of the client's connection."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self.is_read = asyncio.Event()

    async def pieces(self) -> AsyncIterator[bytes]:
        while not self.is_read.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            if not message.get("more_body", False):
                self.is_read.set()
            if message.get("body"):
                yield message["body"]

    async def beginning(self) -> bytes:
        """The body as far as `MOST_BYTES`, and the piece that passes them."""
        pieces, size = [], 0
        async for piece in self.pieces():
            pieces.append(piece)
            size += len(piece)
            if size > MOST_BYTES:
                break
        return b"".join(pieces)

    async def until_disconnected(self) -> None:
        await self.is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Proxy:
    """`transport` replaces the network in tests."""

    def __init__(
        self, url: str, observer: Observer, transport: httpx.AsyncBaseTransport | None = None
    ):
        self.url, self.observer = httpx.URL(url), observer
        limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S)
        self.transport = transport or httpx.AsyncHTTPTransport(limits=limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1011})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.transport.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        upload = RequestUpload(receive)
        answering = asyncio.ensure_future(self._answer(scope, upload, send))
        leaving = asyncio.ensure_future(upload.until_disconnected())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _answer(self, scope: Scope, upload: RequestUpload, send: Send) -> None:
        exchange = self.observer.exchange(scope["method"], scope["path"], scope["headers"])
        if not has_body(scope):
            upload.is_read.set()
        try:
            if exchange is None:
                await self._hand_on(scope, upload.pieces() if has_body(scope) else None, send)
                return
            begun = await upload.beginning()
            if not upload.is_read.is_set():
                await self._hand_on(scope, joined(begun, upload.pieces()), send)
            else:
                exchange.begin(begun)
                await self._hand_on(scope, begun, send, exchange)
        except Disconnected:
            return
        finally:
            if exchange is not None:
                exchange.close()

    async def _hand_on(
        self,
        scope: Scope,
        body: AsyncIterator[bytes] | bytes | None,
        send: Send,
        exchange: Exchange | None = None,
    ) -> None:
        """Request and answer as they come; `exchange` is shown a copy of the answer."""
        headers = handed_on(scope["headers"])
        try:
            response = await self._ask(scope, headers, body)
        except httpx.TransportError as error:
            await refuse(send, self.url, error)
            return
        try:
            if exchange is not None:
                exchange.answer_begins(response.status_code, response.headers)
            await send(start_of(response))
            async for piece in pieces_of(response):
                if exchange is not None:
                    exchange.seen(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            if exchange is not None:
                exchange.end()
        except httpx.TransportError:
            return  # the answer stays unfinished, which breaks the client's connection off too
        finally:
            await response.aclose()

    async def _ask(
        self, scope: Scope, headers: Headers, body: AsyncIterator[bytes] | bytes | None
    ) -> httpx.Response:
        path = self.url.raw_path.rstrip(b"/") + scope["raw_path"]
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        timeout = {"connect": CONNECT_S, "read": None, "write": None, "pool": None}
        request = httpx.Request(
            scope["method"],
            self.url.copy_with(raw_path=path + query),
            headers=headers,
            content=body,
            extensions={"timeout": timeout},
        )
        if isinstance(body, bytes) or (body is None and scope["method"] in REPEATABLE):
            return await send_async(self.transport.handle_async_request, request)
        return await self.transport.handle_async_request(request)


def has_body(scope: Scope) -> bool:
    return any(name in LENGTHS for name, _ in scope["headers"])


async def joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


async def pieces_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """Body as it comes, compressed where it is."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for piece in response.stream:
        yield piece


def start_of(response: httpx.Response) -> Message:
    headers = _of_message((name.lower(), value) for name, value in response.headers.raw)
    return {"type": "http.response.start", "status": response.status_code, "headers": headers}


def handed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers of a request without those of its connection; the server is its host."""
    return [pair for pair in _of_message(headers) if pair[0] != b"host"]


def _of_message(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    pairs = list(headers)
    named = {
        one.strip().lower()
        for name, value in pairs
        if name == b"connection"
        for one in value.split(b",")
    }
    return [pair for pair in pairs if pair[0] not in OF_CONNECTION | named]


async def refuse(send: Send, url: httpx.URL, error: Exception) -> None:
    """502, in OpenAI's form of errors."""
    reason = str(error) or type(error).__name__
    message = f"{url} does not answer ({reason})"
    error_body = {"message": message, "type": "bad_gateway", "param": None, "code": 502}
    body = json.dumps({"error": error_body}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 502, "headers": headers})
    await send({"type": "http.response.body", "body": body})
