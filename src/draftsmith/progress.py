"""One progress line with an ETA for long work. Torch-free; rewrites its line on a terminal, prints
now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO


def duration(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


class Progress:
    """`Progress("generate", total=200, unit="answers")`; `update(done, note="812 tok/s")`;
    `close()`.

    The ETA is measured from the work done since construction, so a resumed job gives `start`.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        unit: str = "",
        start: int = 0,
        stream: TextIO | None = None,
    ):
        self.label, self.total, self.unit, self.start = label, total, unit, start
        self.stream = stream or sys.stderr
        self.interactive = self.stream.isatty()
        self.interval_s = 0.2 if self.interactive else 10.0
        self.begun_s = time.monotonic()
        self.last_s = float("-inf")
        self.last_line = ""

    def update(self, done: int, note: str = "") -> None:
        now_s = time.monotonic()
        if now_s - self.last_s < self.interval_s and done < self.total:
            return
        self.last_s = now_s
        self._write(self._line(done, now_s - self.begun_s, note))

    def close(self, note: str = "") -> None:
        if note:
            self._write(f"{self.label}: {note}")
        if self.interactive and self.last_line:
            self.stream.write("\n")
            self.stream.flush()

    def _line(self, done: int, elapsed_s: float, note: str) -> str:
        fresh = done - self.start
        left = (
            f"{duration(elapsed_s / fresh * (self.total - done))} left"
            if fresh > 0
            else "estimating"
        )
        if done >= self.total:
            left = f"took {duration(elapsed_s)}"
        parts = [f"{self.label}: {done}/{self.total} {self.unit}".rstrip(), left, note]
        return ", ".join(part for part in parts if part)

    def _write(self, line: str) -> None:
        if line == self.last_line:
            return
        if self.interactive:
            self.stream.write("\r" + line.ljust(len(self.last_line)))
        else:
            self.stream.write(line + "\n")
        self.stream.flush()
        self.last_line = line
