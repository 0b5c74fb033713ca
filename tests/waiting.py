"""Wait for what another thread, process or server does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx


def wait_until(holds: Callable[[], object], timeout_s: float = 240.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.005)


def wait_for(
    url: str, process: Any, said: Callable[[], str | None], *, timeout_s: float = 120.0
) -> None:
    """Until `url` answers with status 200. Fails with what the process said where it ends or takes
    too long."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        assert process.poll() is None and time.monotonic() < deadline_s, said()
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=10).status_code == 200:
                return
        time.sleep(0.1)
