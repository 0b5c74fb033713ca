"""End of a loop or a server by signals, after the work in hand."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stopping(stop: threading.Event) -> Iterator[None]:
    """Lets SIGTERM, SIGINT and SIGHUP end the loop after the work in hand. Signals are the main
    thread's only."""
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


@contextmanager
def sigterm_ends(server: Any) -> Iterator[None]:
    """Lets SIGTERM end a server of uvicorn from now on, before it listens too, and what follows it
    run: it raises the signal again once it has shut down."""
    previous = signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
