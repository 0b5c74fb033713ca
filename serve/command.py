"""`draftsmith serve`: bind the port, load target and draft, build the engine, serve until a signal,
drain and flush."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress

import torch
from fastapi import FastAPI

from draftsmith.lock import bind, sigterm_ends
from draftsmith.progress import set_up_logging
from draftsmith.record import Sink
from draftsmith.serve.config import ServeConfig
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.http.server import Server
from draftsmith.serve.listen import HttpServer, create_app
from draftsmith.serve.load import LoadedDraft, MakeSink, load_engine, load_served_target
from draftsmith.serve.metrics.dashboard import EVERY_S, History, Source
from draftsmith.serve.metrics.log_line import StatsLog
from draftsmith.serve.warm_up import warm_up
from draftsmith.serve.watch import watch_versions

log = logging.getLogger(__name__)


def run(config: ServeConfig, make_sink: MakeSink) -> int:
    """`make_sink` is called when the config asks to learn; this package cannot store records."""
    set_up_logging(config.log_format)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    listener = bind(config.host, config.port)
    engine, draft, sink = load_engine(config, load_served_target(config), make_sink)
    warm_up(engine)
    serve(config, engine, listener, draft=draft, sink=sink)
    return 0


def serve(
    config: ServeConfig,
    engine: EngineCore,
    listener: socket.socket,
    *,
    draft: LoadedDraft,
    sink: Sink | None,
) -> None:
    """Blocks until SIGTERM or SIGINT, then lets running requests finish and flushes the sink."""
    with ExitStack() as services:  # ended in reverse order
        if sink is not None:
            services.callback(sink.close)
        loop = EngineLoop(engine).start()
        services.callback(loop.close, drain_s=config.drain_s)
        server = Server(loop, config)
        history = History(engine)
        services.enter_context(repeated(history.look, EVERY_S, "history"))
        dashboard = Source(history, server.metrics.by_class, server.model, config.versions)
        if config.log_stats_s > 0:
            look = StatsLog(engine).look
            services.enter_context(repeated(look, config.log_stats_s, "log"))
        if config.versions is not None:
            services.callback(watch_versions(config, loop, draft).stop)
        app = create_app(server, dashboard)
        answering = http_server(app, server, listener)
        with sigterm_ends(answering), services.pop_all(), suppress(KeyboardInterrupt):
            answering.run(sockets=[listener])


@contextmanager
def repeated(look: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Calls `look` every so many seconds, meanwhile, on a thread of its own."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(every_s):
            look()

    threading.Thread(target=run, name=f"draftsmith-{name}", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


def http_server(app: FastAPI, server: Server, listener: socket.socket) -> HttpServer:
    host, port = listener.getsockname()[:2]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        told = f"{server.loop.engine.drafts}; dashboard: {url}/dashboard"
        log.info("serving %r on %s (%s)", server.model, url, told)
        yield

    app.router.lifespan_context = lifespan
    return HttpServer(app, server)
