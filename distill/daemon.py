"""`draftsmith distill`: learn from served traffic, publish what is proven better, take back what turns out worse."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from draftsmith.distill import learner as learning
from draftsmith.distill import zero
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.crew import follow, joined
from draftsmith.distill.latency_guard import LatencyGuard, scraper
from draftsmith.distill.lock import learner_lock
from draftsmith.distill.loop import Daemon
from draftsmith.distill.place import device_of
from draftsmith.distill.status import Status
from draftsmith.distill.status_server import StatusServer
from draftsmith.distill.throttle import Guard, NoGuard, Throttle
from draftsmith.drafters.ranks import LEADER, Channel
from draftsmith.errors import UserError


def run(config: DistillConfig, stop: threading.Event | None = None) -> int:
    """Until SIGTERM, SIGINT or `stop`; what was learned is saved and a restart goes on from there."""
    check(config)
    stop = stop or threading.Event()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with joined(device_of(config.device)) as crew:
        if crew is not None and crew.rank != LEADER:
            follow(crew.channel, config)
            return 0
        channel = None if crew is None else crew.channel
        with learner_lock(config.versions), stopping(stop):
            learn(config, stop, channel)
    return 0


def learn(config: DistillConfig, stop: threading.Event, channel: Channel | None) -> None:
    status, throttle = Status(config.versions), Throttle(config.learn.budget, guard_of(config), stop)
    with ExitStack() as closing:
        if config.status_port is not None:
            server = StatusServer(status, config.status_host, config.status_port)
            closing.callback(server.close)
            status.event(f"status at http://{config.status_host}:{server.port}")
        while True:
            daemon = begin(config, status, throttle, channel)
            daemon.loop(stop)
            if not daemon.is_outdated:
                return
            status.event(f"target {config.target!r} has new weights, which the servers run already; reading it again")


def begin(config: DistillConfig, status: Status, throttle: Throttle, channel: Channel | None) -> Daemon:
    try:
        return Daemon(config, status, throttle, channel)
    except OSError as error:
        raise UserError(f"the learner cannot begin ({error}); make room, or give another --versions or --buffer") from error


def guard_of(config: DistillConfig) -> Guard:
    if config.server is None or config.tpot_ms is None:
        return NoGuard()
    return LatencyGuard(scraper(config.server), config.tpot_ms / 1000)


@contextmanager
def stopping(stop: threading.Event) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP end the loop after the work in hand. Signals are the main thread's only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup leaves it
        handled.append(signal.SIGHUP)
    before = [signal.signal(number, lambda *_: stop.set()) for number in handled]
    try:
        yield
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


def check(config: DistillConfig) -> None:
    learning.check(config.learn)
    if config.deepspeed is not None:
        zero.check(config.deepspeed)
    if (config.server is None) != (config.tpot_ms is None):
        raise UserError("server and tpot_ms belong together; give both or neither")
    if config.tpot_ms is not None and not config.tpot_ms > 0:
        raise UserError(f"tpot_ms is {config.tpot_ms}; it must be above 0, for example 25")
    gate = config.gate
    if not 0 < gate.held_out < 1:
        raise UserError(f"gate.held_out is {gate.held_out}; it must lie between 0 and 1, for example 0.2")
    if not 0 < gate.error < 1:
        raise UserError(f"gate.error is {gate.error}; it must lie between 0 and 1, for example 0.05")
    if not 0 <= gate.canary <= 0.5:
        raise UserError(f"gate.canary is {gate.canary}; it must be at least 0 and at most 0.5, for example 0.1")
    for name, value in (("every", gate.every), ("requests", gate.requests), ("canary_requests", gate.canary_requests)):
        if value < 1:
            raise UserError(f"gate.{name} is {value}; it must be at least 1")
    if gate.window < gate.requests:
        raise UserError(f"gate.window is {gate.window}, below gate.requests {gate.requests}; no decision could ever be made")
    pool = config.pool
    if pool.most is not None and pool.most < 0:
        raise UserError(f"pool.most is {pool.most}; it must be 0, which is off, or more")
    if not 1 <= pool.requests <= pool.idle_requests:
        raise UserError(
            f"pool.requests is {pool.requests}; it must be at least 1 and at most pool.idle_requests {pool.idle_requests}"
        )
