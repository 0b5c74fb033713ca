"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], object], timeout_s: float = 240.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.005)
