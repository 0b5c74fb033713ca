"""Loop of the daemon, by a clock of its own."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.distill import daemon as module
from draftsmith.distill.daemon import Daemon


class SlowDaemon(Daemon):
    """Every cycle takes 10 s. `found` are the cycles that find something."""

    def __init__(self, found: set[int]):
        self.config: Any = SimpleNamespace(until_idle_s=1.0, poll_s=0.0)
        self.source: Any = SimpleNamespace(is_new=False)
        self.counters: Any = SimpleNamespace(updates=0)
        self.status: Any = SimpleNamespace(event=lambda text: None)
        context = SimpleNamespace(has_updates_left=True)
        self.track: Any = SimpleNamespace(live=SimpleNamespace(version=1), context=context)
        self.is_outdated = False
        self.found, self.cycles, self.now_s = found, 0, 0.0

    def cycle(self) -> bool:
        self.now_s += 10
        self.cycles += 1
        return self.cycles in self.found

    def finish(self) -> bool:
        return True

    def save(self) -> None:
        pass

    def show(self) -> None:
        pass


def test_the_time_of_a_slow_cycle_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = SlowDaemon(found={2})
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: daemon.now_s))
    daemon.loop(threading.Event())
    # The first finds nothing, and what came meanwhile is not lost; the last two find nothing, 10 s
    # apart.
    assert daemon.cycles == 4
