"""Parts of a fleet as processes, each started again when it ends, as systemd or Kubernetes do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

# Between two looks at a part.
LOOK_S = 0.1
# After an end and before the next start; doubled while starts fail.
PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
# Of a part that was up and answers no more while its process stays.
DEAD_S = 20.0


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


class Part:
    """One process in a session of its own, with a thread that keeps it running.

    Args:
        start: starts the process.
        is_up: True once it answers; for an engine a look at its health.
    """

    def __init__(
        self, name: str, start: Callable[[], Process], is_up: Callable[[], bool] = lambda: True
    ):
        self.name, self.start, self.is_up = name, start, is_up
        self.process: Process = start()
        self.starts = 1
        self.has_come_up = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
        self._thread.start()

    @property
    def up(self) -> bool:
        return self.process.poll() is None and self.has_come_up

    def find(self, pattern: str) -> int | None:
        """Process of this part whose command line contains `pattern`; its first one for ""."""
        if not pattern:
            return self.process.pid if self.process.poll() is None else None
        found = [
            pid for pid, words in descendants(self.process.pid).items() if pattern in words
        ]  # fmt: skip
        return min(found) if found else None

    def stop(self) -> None:
        """End it for good: a signal, then a kill of all that it left."""
        self._ended.set()
        self._thread.join()
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + DEAD_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        self._sweep()

    def _keep(self) -> None:
        pause_s, failing_s = PAUSE_S, 0.0
        while not self._ended.wait(LOOK_S):
            if self.process.poll() is not None:
                self._sweep()
                pause_s = PAUSE_S if self.has_come_up else min(LONGEST_PAUSE_S, 2 * pause_s)
                self.has_come_up = False
                if self._ended.wait(pause_s):
                    return
                self.process, self.starts, failing_s = self.start(), self.starts + 1, 0.0
                continue
            if self.is_up():
                self.has_come_up, failing_s = True, 0.0
            elif self.has_come_up:
                failing_s = failing_s or time.monotonic()
                if time.monotonic() - failing_s > DEAD_S:
                    self._sweep()

    def _sweep(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def running() -> dict[int, tuple[int, str]]:
    """Parent and command line, with its short name, of every process that has not ended."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may contain blanks.
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            if state != "Z":
                found[int(folder.name)] = int(parent), f"{words.decode(errors='replace')} {name}"
    return found


def is_running(pid: int) -> bool:
    """True for a process that has not ended."""
    try:
        _, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return False
    return rest.split()[0] not in ("Z", "X")


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below `pid`."""
    everything, below = running(), {pid}
    found: dict[int, str] = {}
    while below:
        below = {one for one, (parent, _) in everything.items() if parent in below} - set(found)
        found |= {one: everything[one][1] for one in below}
    return found


def wait_for_end(pattern: str, limit_s: float) -> bool:
    """True once no process has `pattern` in its command line; False after the limit."""
    deadline_s = time.monotonic() + limit_s
    while any(pattern in words for _, words in running().values()):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOOK_S)
    return True
