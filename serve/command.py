"""`draftsmith serve`: loads target and draft, binds the port, serves until told to stop, then
drains and flushes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, cast

import torch
import uvicorn
from fastapi import FastAPI
from transformers.utils import logging as transformers_logging

from draftsmith.drafters.checkpoint import DRAFT_DTYPES, load, load_draft
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.published.versions import latest, open_version
from draftsmith.drafters.target.ranks import LEADER, Channel
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.errors import UserError
from draftsmith.record import Sink
from draftsmith.serve.app import create_app
from draftsmith.serve.config import ServeConfig
from draftsmith.serve.config_checks import check_engine, check_serve
from draftsmith.serve.dashboard.board import Dashboard
from draftsmith.serve.dashboard.learning import Learning
from draftsmith.serve.dashboard.live_text import TextView
from draftsmith.serve.dashboard.samples import History
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.engine.trees import wanted_tree
from draftsmith.serve.http.gate import Limits
from draftsmith.serve.http.server import Server
from draftsmith.serve.http.speculation_report import Level
from draftsmith.serve.metrics.log_line import StatsLog
from draftsmith.serve.metrics.server import ServerMetrics
from draftsmith.serve.parallel import LeadingTarget, follow, join
from draftsmith.serve.watch import VersionWatcher

MakeSink = Callable[[ServeConfig, Target], Sink]


def run(config: ServeConfig, make_sink: MakeSink | None = None) -> int:
    """`make_sink` is called when the config asks to learn; this package does not know what records
    are stored in."""
    logging.basicConfig(level=logging.INFO, format="draftsmith: %(message)s")
    for chatty in ("httpx", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    check(config)
    if config.learn is not None and make_sink is None:
        raise UserError(
            "learn is given but nothing stores records here; start the server as `draftsmith serve`"
        )
    torch.set_num_threads(config.threads or default_threads())
    if config.tensor_parallel > 1:
        return run_sharded(config, make_sink)
    listener = bind(config.host, config.port)
    device = device_of(config)
    target = Target.load(
        config.target,
        dtype=dtype_of(config, device),
        device=device,
        trust_remote_code=config.trust_remote_code,
    )
    lead(config, target, listener, make_sink)
    return 0


def run_sharded(config: ServeConfig, make_sink: MakeSink | None) -> int:
    """One of the processes that share the target: rank 0 serves, the others run its
    passes with it."""
    device = device_of(config)
    place = join(config.tensor_parallel, device)
    kind = LeadingTarget if place.rank == LEADER else Target
    listener = bind(config.host, config.port) if place.rank == LEADER else None
    target = kind.load(
        config.target,
        dtype=dtype_of(config, device),
        device=place.device,
        shards=place.size,
        trust_remote_code=config.trust_remote_code,
    )
    channel = Channel()
    if listener is None:
        follow(target, channel)
        return 0
    assert isinstance(target, LeadingTarget)
    try:
        lead(config, target.lead(channel), listener, make_sink)
    finally:
        target.stop()
    return 0


def lead(
    config: ServeConfig, target: Target, listener: socket.socket, make_sink: MakeSink | None
) -> None:
    draft = load_drafter(config, target)
    sink = make_sink(config, target) if config.learn is not None and make_sink is not None else None
    engine = Engine(
        target,
        draft.drafter,
        config.engine(),
        sink=sink,
        draft_version=draft.version,
        fallback=load_fallback(config),
    )
    serve(config, engine, listener, serving=draft.number, sink=sink)


def check(config: ServeConfig) -> None:
    """Whatever can be told before anything is loaded."""
    check_serve(config)
    engine = config.engine()
    check_engine(engine)
    wanted_tree(engine)


def device_of(config: ServeConfig) -> str:
    if config.device is not None:
        try:
            kind = torch.device(config.device).type
        except RuntimeError as error:
            raise UserError(
                f"device is {config.device!r}, which torch does not know; give cpu or cuda"
            ) from error
        if kind == "cuda" and not torch.cuda.is_available():
            raise UserError(
                f"device is {config.device!r} but torch sees no CUDA device here; give cpu or "
                "leave it out"
            )
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(config: ServeConfig, device: str) -> str:
    """On a CPU float32 is faster for few rows, and greedy choices depend less on who else is in the
    batch."""
    return "float32" if config.dtype == "auto" and device == "cpu" else config.dtype


def default_threads() -> int:
    """All cores but one. HTTP and clients need it, and OpenMP threads that wait for a core they
    share are ruinous: ten times slower was measured with 2 threads on 2 busy cores."""
    return min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) - 1))


class LoadedDraft(NamedTuple):
    drafter: ServingDrafter | None
    version: str  # "" without a drafter, "0" for one that no version names
    number: int | None  # of the versions folder


def load_drafter(config: ServeConfig, target: Target) -> LoadedDraft:
    """n-grams if they were chosen, else the trained draft if there is one, suffix decoding beside
    it or alone, or nothing."""
    if config.ngram:
        return LoadedDraft(
            Ngram(min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max), "0", None
        )
    loaded = load_trained(config, target)
    if not config.suffix:
        return loaded
    text = Suffix(config.suffix_options())
    if loaded.drafter is None:
        return LoadedDraft(text, "0", None)
    return loaded._replace(drafter=TextFirst(loaded.drafter, text, share=config.suffix_share))


def load_fallback(config: ServeConfig) -> ServingDrafter | None:
    if config.fallback == "ngram":
        return Ngram(min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max)
    return Suffix(config.suffix_options()) if config.fallback == "suffix" else None


def load_trained(config: ServeConfig, target: Target) -> LoadedDraft:
    """The live version of the versions folder, else the draft."""
    number = latest(config.versions) if config.versions is not None else None
    if number is not None:
        folder, dtype = open_version(config.versions, number), DRAFT_DTYPES[config.draft_dtype]
        return LoadedDraft(load(folder, target, dtype=dtype), str(number), number)
    draft = load_draft(config, target)
    if draft is not None:
        return LoadedDraft(draft, "0", None)
    if config.versions is not None:
        raise UserError(
            f"versions folder {config.versions!r} has no version yet; give the draft to start with"
        )
    return LoadedDraft(None, "", None)


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


def limits_of(config: ServeConfig) -> Limits:
    return Limits(
        api_keys=config.api_key or (),
        max_body_bytes=config.max_body_bytes,
        max_concurrency=config.max_concurrency,
        timeout_s=config.request_timeout_s,
    )


def serve(
    config: ServeConfig,
    engine: Engine,
    listener: socket.socket,
    *,
    serving: int | None,
    sink: Sink | None,
) -> None:
    """Blocks until SIGTERM or SIGINT, then lets running requests finish and flushes the sink."""
    loop = EngineLoop(engine).start()
    name = config.name or engine.target.name
    metrics = ServerMetrics(engine, name)
    history = History(engine, metrics.by_class).start()
    view = TextView() if config.dashboard_text else None
    if view is not None:
        engine.onlooker = view.hear
    server = Server(
        loop,
        name,
        metrics,
        limits_of(config),
        cast(Level, config.per_request_spec_decode_metrics),
        dashboard=Dashboard(history, Learning(config.versions, config.learn), view),
    )
    stats_log = StatsLog(engine, config.log_stats_s).start()
    watcher = None
    if config.versions is not None:
        # A swap is one line of the log: no bar for every version that is read.
        transformers_logging.disable_progress_bar()
        watcher = VersionWatcher(
            loop, config.versions, poll_s=config.poll_s, serving=serving
        ).start()
    app = create_app(server)
    host, port = listener.getsockname()[:2]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        print(f"draftsmith: serving {name!r} on http://{host}:{port}", file=sys.stderr, flush=True)
        yield

    app.router.lifespan_context = lifespan
    options = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=max(1, round(config.drain_s))
    )
    # uvicorn raises the signal again once it has shut down; the sink still has to be flushed then.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        uvicorn.Server(options).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        stats_log.stop()
        history.stop()
        if watcher is not None:
            watcher.stop()
        loop.close(drain_s=config.drain_s)
        if sink is not None:
            sink.close()
        signal.signal(signal.SIGTERM, previous)
