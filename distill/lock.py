"""Lock of a versions folder: one learner at a time, one publisher. The kernel drops the lock with
its process, so a dead learner never blocks the next one."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftsmith.errors import UserError


@contextmanager
def learner_lock(versions: str | Path, role: str = "learner") -> Iterator[None]:
    """Holds the lock of one role. Raises a `UserError` that names the holder when another process
    has it."""
    folder = Path(versions)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{role}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"versions folder {str(folder)!r} cannot be written ({error.strerror}); give another "
            "folder"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(descriptor)
            raise UserError(
                f"another {role} ({holder}) already works on {str(folder)!r}; stop it or give "
                "another --versions"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0
        )
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {record['pid']} on {record['host']}"
    except (ValueError, KeyError, TypeError):
        return "just starting"
