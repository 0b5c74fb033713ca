"""Locks of folders that one process writes: one learner, one publisher, one training; the address
of a server; and their end by signals, after the work in hand. The kernel drops a lock with its
process, so a dead one never blocks the next."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.progress import say

# What a file system without locks answers.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def folder_lock(folder: str | Path, role: str, *, option: str = "out") -> Iterator[None]:
    """Holds the lock of one role.

    Raises:
        UserError: another process has it, or the folder, that of the option, cannot be written.
    """
    path = Path(folder) / f"{role}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        while not _taken(descriptor, path):
            os.close(descriptor)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except BlockingIOError as error:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise UserError(
            f"{option} {str(folder)!r} is in use by another {role} ({holder}); wait until it ends "
            "or stop it, or give another folder"
        ) from error
    except OSError as error:
        raise UserError(
            f"{option} {str(folder)!r} cannot be written to ({error.strerror}); give another folder"
        ) from error
    try:
        with suppress(OSError):  # a full disk goes without a name for the message of the next one
            os.ftruncate(descriptor, 0)
            own = {"pid": os.getpid(), "host": socket.gethostname()}
            os.pwrite(descriptor, json.dumps(own).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _taken(descriptor: int, path: Path) -> bool:
    """False for a file that its last holder has deleted meanwhile."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


def _holder(descriptor: int) -> str:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {record['pid']} on {record['host']}"
    except (ValueError, KeyError, TypeError):
        return "just starting"


def bind(host: str, port: int) -> socket.socket:
    """Socket that listens at an address, of this server alone."""
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

    def end() -> None:
        if not stop.is_set():
            with suppress(OSError):  # not printed, as a line may be half printed just now
                os.write(2, b"\ndraftsmith: stopping after the work in hand\n")
        stop.set()

    with on_signals(end, *handled):
        yield


@contextmanager
def sigterm_ends(server: Any) -> Iterator[None]:
    """Lets SIGTERM end a server of uvicorn from now on, before it listens too, and what follows it
    run: it raises the signal again once it has shut down."""
    with on_signals(lambda: setattr(server, "should_exit", True), signal.SIGTERM):
        yield


def say_stopping(drain_s: float) -> None:
    say(f"stopping: requests that run get {drain_s:g} s to finish")


@contextmanager
def on_signals(act: Callable[[], object], *numbers: int) -> Iterator[None]:
    """Calls `act` in place of what the signals do."""
    before = [signal.signal(number, lambda *_: act()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
