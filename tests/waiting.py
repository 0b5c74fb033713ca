"""Wait for what another thread, process or server does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx


def wait_until(
    holds: Callable[[], object],
    timeout_s: float = 240.0,
    *,
    process: Any = None,
    said: Callable[[], str | None] = lambda: "it did not happen in time",
    pause_s: float = 0.005,
) -> None:
    """Fails with what was `said` where it takes too long, or `process` ends before."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert process is None or process.poll() is None, said()
        assert time.monotonic() < deadline_s, said()
        time.sleep(pause_s)


def wait_for(
    url: str, process: Any, said: Callable[[], str | None], *, timeout_s: float = 120.0
) -> None:
    """Until `url` answers with status 200."""

    def answers() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(url, timeout=10).status_code == 200
        return False

    wait_until(answers, timeout_s, process=process, said=said, pause_s=0.1)
