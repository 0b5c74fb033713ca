"""`draftsmith distill`: learn from served traffic, publish what is proven better, take back what turns out worse."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftsmith.distill import learner as learning
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.lock import learner_lock
from draftsmith.distill.loop import Daemon
from draftsmith.errors import UserError


def run(config: DistillConfig, stop: threading.Event | None = None) -> int:
    """Until SIGTERM, SIGINT or `stop`; what was learned is saved and a restart goes on from there."""
    check(config)
    stop = stop or threading.Event()
    with learner_lock(config.versions), stopping(stop):
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        Daemon(config).loop(stop)
    return 0


@contextmanager
def stopping(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT end the loop after the work in hand. Signals are the main thread's only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stop.set()) for number in handled]
    try:
        yield
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


def check(config: DistillConfig) -> None:
    learning.check(config.learn)
    gate = config.gate
    if not 0 < gate.held_out < 1:
        raise UserError(f"gate.held_out is {gate.held_out}; it must lie between 0 and 1, for example 0.2")
    if not 0 < gate.error < 1:
        raise UserError(f"gate.error is {gate.error}; it must lie between 0 and 1, for example 0.05")
    for name, value in (("every", gate.every), ("requests", gate.requests)):
        if value < 1:
            raise UserError(f"gate.{name} is {value}; it must be at least 1")
    if gate.window < gate.requests:
        raise UserError(f"gate.window is {gate.window}, below gate.requests {gate.requests}; no decision could ever be made")
