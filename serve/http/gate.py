"""What stands before the endpoints: API keys, the size of bodies, how many answers are being made.
Plain ASGI, so that a client that leaves is still seen to leave."""

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
ANSWERING_PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Who may ask, and how much."""

    api_keys: tuple[str, ...] = ()  # any of them opens; empty: no key is asked for
    max_body_bytes: int = 16 * 2**20
    max_concurrency: int | None = None  # answers being made at the same time, waiting ones included
    timeout_s: float | None = None  # from a request's arrival to the end of its answer


@dataclass
class Load:
    num_answering: int = 0


class Gate:
    """`responded` hears the status of every answer of the generating endpoints, refusals here
    included."""

    def __init__(self, app: ASGIApp, limits: Limits, load: Load, responded: Callable[[int], None]):
        self.app, self.limits, self.load, self.responded = app, limits, load, responded
        self._digests = digests(limits.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answering = scope["path"] in ANSWERING_PATHS
        if answering:
            send = _overheard(send, self.responded)
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
        told = headers.get("content-length", "")
        if told.isdecimal() and int(told) > self.limits.max_body_bytes:
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
    """In a time that tells neither which key is near nor how near."""
    scheme, _, key = authorization.partition(" ")
    given = hashlib.sha256(key.strip().encode()).digest()
    matches = [hmac.compare_digest(given, digest) for digest in accepted]
    return scheme.lower() == "bearer" and any(matches)


def tenant_of(authorization: str) -> str:
    """Whoever holds a key is one client to the queue; the key itself goes no further."""
    return hashlib.sha256(authorization.encode()).hexdigest()[:16]


def too_large(limit: int) -> str:
    return (
        f"the request body has more than the {limit} bytes that this server takes; send a smaller "
        "one"
    )


def _overheard(send: Send, responded: Callable[[int], None]) -> Send:
    async def overheard(message: Message) -> None:
        if message["type"] == "http.response.start":
            responded(message["status"])
        await send(message)

    return overheard


def _bounded(receive: Receive, limit: int) -> Receive:
    """Bodies sent in chunks do not tell their size, so it is counted."""
    count = 0

    async def bounded() -> Message:
        nonlocal count
        message = await receive()
        count += len(message.get("body", b""))
        if count > limit:
            raise HTTPException(413, too_large(limit))
        return message

    return bounded
