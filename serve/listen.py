"""The ASGI application, all endpoints behind the request limits, and the HTTP server around it:
connections that send nothing are closed, and it ends in good order."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from draftsmith.lock import say_stopping
from draftsmith.serve.http.completions import add_completion_endpoints
from draftsmith.serve.http.endpoints import (
    add_learning_endpoints,
    add_service_endpoints,
    add_speculation_endpoints,
    add_token_endpoints,
)
from draftsmith.serve.http.errors import add_error_handlers
from draftsmith.serve.http.limits import RequestLimits
from draftsmith.serve.http.responses_api import add_responses_endpoint
from draftsmith.serve.http.schema import describe
from draftsmith.serve.http.server import Server
from draftsmith.serve.metrics.dashboard import Source, add_dashboard
from draftsmith.version import __version__

HEAD_S = 20.0  # in which the head of a request comes
FLUSH_S = 5.0  # in which clients read the end of their answers


def create_app(server: Server, dashboard: Source | None = None) -> FastAPI:
    app = FastAPI(title="draftsmith", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(
        RequestLimits,
        http=server.http,
        api_keys=server.api_keys,
        load=server.load,
        responded=server.metrics.responded,
    )
    add_error_handlers(app)
    add_service_endpoints(app, server)
    add_token_endpoints(app, server)
    add_speculation_endpoints(app, server)
    add_learning_endpoints(app, server)
    add_completion_endpoints(app, server)
    add_responses_endpoint(app, server)
    if dashboard is not None:
        add_dashboard(app, dashboard)
    describe(app, model=server.model, guarded=bool(server.api_keys))
    return app


class TimedHeads(AutoHTTPProtocol):
    """Connection that is closed when the head of a request does not come in time."""

    head_s = HEAD_S
    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(error)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._closing is None:
            self._closing = self.loop.call_later(self.head_s, self.transport.close)

    def _unwatch(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


class HttpServer(uvicorn.Server):
    """At its end requests that come are refused with 503 and those that run get `drain_s`; then
    their clients receive that the server ends, and connections are closed."""

    def __init__(self, app: FastAPI, server: Server):
        http = server.http
        head_s = min(HEAD_S, http.request_timeout_s or HEAD_S)
        protocol = type("TimedHeads", (TimedHeads,), {"head_s": head_s})
        # uvicorn cancels what is left after a time of its own in the middle of it.
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # as all other lines
                http=protocol,
                ws="none",
                timeout_keep_alive=http.keep_alive_s,
                timeout_graceful_shutdown=None,
            )
        )
        self._loop, self._drain_s = server.loop, http.drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        say_stopping(self._drain_s)
        await self._drain()
        aborting = asyncio.get_running_loop().call_later(FLUSH_S, self._abort)
        await super().shutdown(sockets)
        aborting.cancel()

    async def _drain(self) -> None:
        """A second interrupt ends it at once."""
        drained = asyncio.ensure_future(asyncio.to_thread(self._loop.close, self._drain_s))
        while not drained.done():
            await asyncio.wait({drained}, timeout=0.1)
            if self.force_exit:
                await asyncio.to_thread(self._loop.close)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
