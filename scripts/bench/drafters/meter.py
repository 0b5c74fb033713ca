"""Time and memory of one training. Shared by both trainers' processes, so it
imports neither of them."""

from __future__ import annotations

import time
from pathlib import Path

import torch


class Meter:
    """Seconds of the process's own CPU time, in which other work on the machine does not count; of
    the clock with CUDA."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self._begun_s = self.now()
        self._begun_wall_s = time.monotonic()
        self._rss = 0

    def now(self) -> float:
        return time.monotonic() if self.cuda else time.process_time()

    def start(self) -> None:
        """Memory in use now (libraries, target, new draft) is not counted."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self._rss = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._rss = resident("VmRSS")
        self._begun_s, self._begun_wall_s = self.now(), time.monotonic()

    def seconds(self) -> float:
        return self.now() - self._begun_s

    def report(self) -> dict[str, float]:
        peak = torch.cuda.max_memory_allocated() if self.cuda else resident("VmHWM")
        return {
            "seconds": self.seconds(),
            "wall_s": time.monotonic() - self._begun_wall_s,
            "peak_bytes": peak,
            "training_bytes": peak - self._rss,
        }


def resident(name: str) -> int:
    """A size of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
