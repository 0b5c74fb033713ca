"""`draftsmith distill`: learn from served traffic, publish what is proven better, roll back what
turns out worse."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from safetensors import SafetensorError

from draftsmith.distill.config import DistillConfig
from draftsmith.distill.config_checks import check_distill
from draftsmith.distill.daemon import Daemon
from draftsmith.distill.status import Status, StatusCollector, serve_metrics
from draftsmith.distill.throttle import Throttle, nothing
from draftsmith.errors import UserError, first_line
from draftsmith.lock import folder_lock, stopping


def run(config: DistillConfig, stop: threading.Event | None = None) -> int:
    """Learns until SIGTERM, SIGINT or `stop`. The state is saved, and a restart goes on from
    there."""
    check_distill(config)
    stop = stop or threading.Event()
    with (
        on_threads(config.threads),
        folder_lock(config.versions, "learner", option="versions"),
        stopping(stop),
    ):
        learn(config, stop)
    return 0


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """So many threads inside, by default half of those outside: the others are the server's."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or max(1, before // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def learn(config: DistillConfig, stop: threading.Event) -> None:
    status, throttle = Status(config.versions), Throttle(config.learn.budget, stop)
    with ExitStack() as closing:
        closing.callback(status.close)
        if config.status_port is not None:
            host = config.status_host
            served = serve_metrics(StatusCollector(status), host, config.status_port)
            closing.callback(served.close)
            status.event(f"status at http://{host}:{served.port}/metrics")
        daemon: Daemon | None = begin(config, status, throttle)
        while daemon is not None:
            daemon.loop(stop)
            if not daemon.is_outdated:
                return
            left, before = daemon.target.revision, daemon.track.predict()
            status.event(f"target {config.target!r} has new weights; reading it again")
            # Its target and drafts go before the next ones come.
            throttle.look_up = nothing
            del daemon
            daemon = begin_again(config, status, throttle, stop)
            if daemon is not None and daemon.target.revision != left:
                daemon.predict(left, before)


def begin_again(
    config: DistillConfig, status: Status, throttle: Throttle, stop: threading.Event
) -> Daemon | None:
    """Begins with the weights that lie there now, again and again until they can be read; None once
    `stop` is set."""
    while not stop.is_set():
        try:
            return begin(config, status, throttle)
        except (UserError, OSError, ValueError, SafetensorError) as error:
            status.event(f"{first_line(error)}; trying again")
            stop.wait(config.poll_s)
    return None


def begin(config: DistillConfig, status: Status, throttle: Throttle) -> Daemon:
    try:
        return Daemon(config, status, throttle)
    except OSError as error:
        raise UserError(
            f"the learner cannot begin ({error}); make room, or give another --versions or --buffer"
        ) from error
