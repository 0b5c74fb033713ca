"""Limits of requests before any endpoint: API keys, the size of bodies and the time in which they
come, the number of answers being made. Plain ASGI, so that a client's disconnect still reaches the
endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftsmith.serve.config import HttpOptions
from draftsmith.serve.http.errors import Refusal, overloaded, timed_out

log = logging.getLogger(__name__)
T = TypeVar("T")

OPEN_PATHS = (
    "/health", "/ping", "/metrics", "/version", "/load", "/openapi.json", "/dashboard", "/",
)  # fmt: skip
ANSWERING_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


PIECE_S = 20.0  # in which the next piece of a body comes
UNREAD_S = 5.0  # after the time of an answer, until a client has read it


@dataclass(frozen=True)
class Arrival:
    """Facts of a request that its head gives."""

    at_s: float
    timeout_s: float | None = None
    num_bytes: int = 0  # of the body

    async def within(self, result: Awaitable[T]) -> T:
        """Raises `Refusal` once the request's time is over."""
        if self.timeout_s is None:
            return await result
        left_s = self.at_s + self.timeout_s - time.monotonic()
        try:
            return await asyncio.wait_for(result, max(0.0, left_s))
        except asyncio.TimeoutError:
            raise timed_out(self.timeout_s) from None


def arrival_of(request: Request) -> Arrival:
    arrival: Arrival = request.state.arrival
    return arrival


@dataclass
class ServerLoad:
    num_answering: int = 0


class RequestLimits:
    """Middleware that holds requests to the server's limits. `responded` is called with the status
    of every answer of the generating endpoints, refusals here included.

    Args:
        api_keys: any of them opens; empty: no key is asked for.
    """

    def __init__(
        self,
        app: ASGIApp,
        http: HttpOptions,
        api_keys: Sequence[str],
        load: ServerLoad,
        responded: Callable[[int], None],
    ):
        self.app, self.http, self.load, self.responded = app, http, load, responded
        self._digests = digests(api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        at_s = time.monotonic()
        answering = scope["path"] in ANSWERING_PATHS
        if answering:
            send = _observed(send, self.responded)
        try:
            self._check(scope, Headers(scope=scope))
            body = await self._body(receive, at_s) if scope["method"] == "POST" else b""
            # A body that is still to come holds no place.
            self._check_load(scope)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
            return
        if body is None:  # the client went away
            return
        arrival = Arrival(at_s, self.http.request_timeout_s, len(body))
        scope.setdefault("state", {})["arrival"] = arrival
        self.load.num_answering += answering
        whole_s = self.http.request_timeout_s
        try:
            await asyncio.wait_for(
                self.app(scope, _replayed(body, receive), send), whole_s and whole_s + UNREAD_S
            )
        except asyncio.TimeoutError:
            log.warning("%s: an answer was not read to its end in time", scope["path"])
        finally:
            self.load.num_answering -= answering

    async def _body(self, receive: Receive, at_s: float) -> bytes | None:
        pieces: list[bytes] = []
        num_bytes, more = 0, True
        whole_s = self.http.request_timeout_s or float("inf")
        while more:
            left_s = min(PIECE_S, at_s + whole_s - time.monotonic())
            try:
                message = await asyncio.wait_for(receive(), left_s)
            except asyncio.TimeoutError:
                raise _cut(408, late(min(PIECE_S, whole_s)), code="timeout") from None
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            num_bytes += len(pieces[-1])
            if num_bytes > self.http.max_body_bytes:
                raise _cut(413, too_large(self.http.max_body_bytes), code="body_too_large")
            more = message.get("more_body", False)
        return b"".join(pieces)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if (
            self._digests
            and scope["path"] not in OPEN_PATHS
            and not opens(self._digests, headers.get("authorization", ""))
        ):
            raise Refusal(
                401,
                "the API key is missing or wrong; send it as a bearer token",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.http.max_body_bytes:
            raise _cut(413, too_large(self.http.max_body_bytes), code="body_too_large")
        self._check_load(scope)

    def _check_load(self, scope: Scope) -> None:
        most = self.http.max_concurrency
        if (
            most is not None
            and scope["path"] in ANSWERING_PATHS
            and self.load.num_answering >= most
        ):
            raise overloaded(
                f"{self.load.num_answering} requests are being answered and this server takes "
                f"{most}; try again later"
            )


def digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def opens(accepted: Sequence[bytes], authorization: str) -> bool:
    """Compare in a time that depends neither on which key is near nor on how near it is."""
    scheme, _, key = authorization.partition(" ")
    given = hashlib.sha256(key.strip().encode()).digest()
    matches = [hmac.compare_digest(given, digest) for digest in accepted]
    return scheme.lower() == "bearer" and any(matches)


def tenant_of(authorization: str) -> str:
    """Name of the client to the queue, one per key; the key itself goes no further."""
    return hashlib.sha256(authorization.encode()).hexdigest()[:16]


def too_large(limit: int) -> str:
    return (
        f"the request body has more than the {limit} bytes that this server takes; send a smaller "
        "one"
    )


def late(seconds: float) -> str:
    return f"the request body did not come within {seconds:g} s; send it without a pause"


def _cut(status: int, message: str, *, code: str) -> Refusal:
    """Refusal of a body that is not read to its end."""
    return Refusal(status, message, code=code, headers={"connection": "close"})


def _observed(send: Send, responded: Callable[[int], None]) -> Send:
    async def observed(message: Message) -> None:
        if message["type"] == "http.response.start":
            responded(message["status"])
        await send(message)

    return observed


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The whole body in one message, then what comes behind it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
