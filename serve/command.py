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

from draftsmith.drafters.target.device import default_threads, device_of, weight_dtype
from draftsmith.drafters.target.sharded import LEADER, Channel
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.lock import sigterm_ends
from draftsmith.progress import set_up_logging
from draftsmith.record import Sink
from draftsmith.serve.config import ServeConfig
from draftsmith.serve.config_checks import check
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.http.server import Server
from draftsmith.serve.listen import HttpServer, create_app
from draftsmith.serve.load import LoadedDraft, MakeSink, load_engine, load_served_target
from draftsmith.serve.metrics.dashboard import EVERY_S, History, Source
from draftsmith.serve.metrics.log_line import StatsLog
from draftsmith.serve.parallel import LeadingTarget, follow, join
from draftsmith.serve.warm_up import warm_up
from draftsmith.serve.watch import watch_versions

log = logging.getLogger(__name__)


def run(config: ServeConfig, make_sink: MakeSink | None = None) -> int:
    """`make_sink` is called when the config asks to learn; this package cannot store records."""
    set_up_logging(config.log_format)
    check(config)
    if config.learn is not None and make_sink is None:
        raise UserError(
            "learn is given but nothing stores records here; start the server as `draftsmith serve`"
        )
    torch.set_num_threads(config.threads or default_threads())
    if config.tensor_parallel > 1:
        return run_sharded(config, make_sink)
    listener = bind(config.host, config.port)
    serve_target(config, load_served_target(config), listener, make_sink)
    return 0


def run_sharded(config: ServeConfig, make_sink: MakeSink | None) -> int:
    """One of the processes that share the target: rank 0 serves, the others run its
    passes with it."""
    device = device_of(config.device)
    place = join(config.tensor_parallel, str(device))
    kind = LeadingTarget if place.rank == LEADER else Target
    listener = bind(config.host, config.port) if place.rank == LEADER else None
    target = kind.load(
        config.target,
        dtype=weight_dtype(
            config.dtype,
            device,
            config.target,
            use="plain",
            trust_remote_code=config.trust_remote_code,
        ),
        device=place.device,
        shards=place.size,
        max_length=config.max_length,
        trust_remote_code=config.trust_remote_code,
    )
    channel = Channel()
    if listener is None:
        follow(target, channel)
        return 0
    assert isinstance(target, LeadingTarget)
    try:
        serve_target(config, target.lead(channel), listener, make_sink)
    finally:
        target.stop()
    return 0


def serve_target(
    config: ServeConfig, target: Target, listener: socket.socket, make_sink: MakeSink | None
) -> None:
    """Load the draft, build the engine, and serve both until the process is stopped."""
    engine, draft, sink = load_engine(config, target, make_sink)
    warm_up(engine)
    serve(config, engine, listener, draft=draft, sink=sink)


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # asyncio does this for the sockets it opens itself. Without it the last part of every answer,
    # written after its header, waits 40 ms for the client's delayed acknowledgement. Accepted
    # connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another port or stop what "
            "uses it"
        ) from error
    return listener


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
        log.info("serving %r on %s (dashboard: %s/dashboard)", server.model, url, url)
        yield

    app.router.lifespan_context = lifespan
    return HttpServer(app, server)
