"""Limits of requests before any endpoint: API keys, the size of bodies, the number of answers being
made. Plain ASGI, so that a client's disconnect still reaches the endpoint."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftsmith.serve.http.errors import Refusal, overloaded

OPEN_PATHS = ("/health", "/ping", "/metrics", "/version", "/load", "/openapi.json", "/dashboard")
ANSWERING_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Keys that open the server, and the most that requests may take."""

    api_keys: tuple[str, ...] = ()  # any of them opens; empty: no key is asked for
    max_body_bytes: int = 16 * 2**20
    max_concurrency: int | None = None  # answers being made at the same time, waiting ones included
    timeout_s: float | None = None  # from a request's arrival to the end of its answer


@dataclass
class Load:
    num_answering: int = 0


class RequestLimits:
    """Middleware that holds requests to `limits`. `responded` is called with the status of every
    answer of the generating endpoints, refusals here included."""

    def __init__(
        self, app: ASGIApp, limits: ServerLimits, load: Load, responded: Callable[[int], None]
    ):
        self.app, self.limits, self.load, self.responded = app, limits, load, responded
        self._digests = digests(limits.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answering = scope["path"] in ANSWERING_PATHS
        if answering:
            send = _observed(send, self.responded)
        try:
            self._check(scope, Headers(scope=scope))
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
            return
        self.load.num_answering += answering
        try:
            await self.app(scope, _bounded(receive, self.limits.max_body_bytes), send)
        finally:
            self.load.num_answering -= answering

    def _check(self, scope: Scope, headers: Headers) -> None:
        if (
            self._digests
            and scope["path"] not in OPEN_PATHS
            and not opens(self._digests, headers.get("authorization", ""))
        ):
            raise Refusal(
                401,
                "the API key is missing or wrong; send it as a bearer token",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.limits.max_body_bytes:
            raise Refusal(413, too_large(self.limits.max_body_bytes), code="body_too_large")
        most = self.limits.max_concurrency
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


def _observed(send: Send, responded: Callable[[int], None]) -> Send:
    async def observed(message: Message) -> None:
        if message["type"] == "http.response.start":
            responded(message["status"])
        await send(message)

    return observed


def _bounded(receive: Receive, limit: int) -> Receive:
    """Count the bytes of bodies, as those sent in chunks do not declare their size."""
    count = 0

    async def bounded() -> Message:
        nonlocal count
        message = await receive()
        count += len(message.get("body", b""))
        if count > limit:
            raise HTTPException(413, too_large(limit))
        return message

    return bounded
