"""What the daemon is doing, for people (one line) and for programs (`VERSIONS/status.json`)."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from draftsmith import files
from draftsmith.distill.gate.gate import Decision

STATUS = "status.json"


class Status:
    """`show` writes the file each time it changes, and the line at most once an interval."""

    def __init__(self, versions: str | Path, stream: TextIO | None = None):
        self.path = Path(versions) / STATUS
        self.stream = stream or sys.stderr
        self.is_terminal = self.stream.isatty()
        self.interval_s = 0.5 if self.is_terminal else 10.0
        self.shown_s = float("-inf")
        self.width = 0
        self.values: dict[str, Any] = {}  # as last shown

    def show(self, line: str, values: dict[str, Any]) -> None:
        self.values = files.plain({"time_s": time.time(), "pid": os.getpid(), **values})
        files.write_json(self.path, self.values)
        if time.monotonic() - self.shown_s < self.interval_s:
            return
        self.shown_s = time.monotonic()
        text = f"distill: {line}"
        if self.is_terminal:
            self._write("\r" + text.ljust(self.width))
            self.width = len(text)
        else:
            self._write(text + "\n")

    def event(self, text: str) -> None:
        """A line that stays."""
        erased = "\r" + " " * self.width + "\r" if self.is_terminal and self.width else ""
        self._write(f"{erased}distill: {text}\n")
        self.width = 0

    def _write(self, text: str) -> None:
        """A line that cannot be written, its disk being full, is no reason to stop; `decisions.jsonl` has what matters."""
        with suppress(OSError):
            self.stream.write(text)
            self.stream.flush()


def describe(decision: Decision, version: int | None, share: float) -> str:
    """`share` is that of a version on trial."""
    comparison = decision.comparison
    text = f"version {version} published" if version else decision.decision
    text += f" for a share of {share:g} of the requests" if share else ""
    text += f": {decision.reason}"
    if comparison is not None and comparison.requests:
        text += (
            f" (alpha {comparison.first:.4f} -> {comparison.second:.4f}, gain {comparison.gain:+.4f} over {comparison.requests} "
            f"requests, p <= {decision.p_value:.2g} against {decision.level:.2g} at any look)"
        )
    return text
