"""Engine's side of the wire: a writer process that is started, watched and ended, and the ring that
leads to it.

The engine waits for nothing here: the process is started and watched by a thread. It is started
again whenever it ends, later each time where it ends soon. Where it ends `RESTARTS` + 1 times in a
row before it has read anything, recording stops, which is logged once. The writer reads an end of
file where its engine died, however it died, and flushes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from draftsmith.fleet.log import logger, once
from draftsmith.fleet.wire.ring import Ring

RESTARTS = 3
# Exit status of a writer that would end the same way again.
REFUSED = 2
LOOK_S = 1.0
# Life of a writer after which the next one is started at once.
STEADY_S = 60.0
LONGEST_WAIT_S = 60.0
# Of an engine that ends, for a writer that flushes. A slower one goes on alone.
CLOSE_S = 5.0
CAPACITY = 64 << 20


class Child:
    """Writer process and its ring.

    `generation` counts its starts: a new process has no request of the one before. It is 0 before
    the first start, and `alive` is False while there is none.

    Args:
        job: JSON values of `draftsmith.fleet.wire.writer.Job`.
    """

    def __init__(
        self, job: Mapping[str, Any], *, share: float = 1.0, capacity: int = CAPACITY
    ) -> None:
        self.job = dict(job)
        self.ring = Ring.create(capacity, share)
        self.generation = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._failures = 0  # starts in a row that left no status
        self._short = 0  # starts in a row that ended before `STEADY_S`
        self._begun_s, self._statuses = 0.0, 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="draftsmith-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def status(self) -> dict[str, Any]:
        """Latest status of the writer, read without waiting; `{}` before the first."""
        data = self.ring.status()
        return json.loads(data) if data else {}

    def close(self) -> None:
        """End the writer, which flushes first, and wait at most `CLOSE_S` for it."""
        self._closing.set()
        self._thread.join(LOOK_S + CLOSE_S)

    def _watch(self) -> None:
        while not self._closing.is_set():
            if self.process is None or self.process.poll() is not None:
                if self.generation and self._gives_up():
                    return
                # None after the first short one, then one look, three, seven.
                waits = 2 ** max(0, self._short - 1) - 1
                if self._closing.wait(min(LONGEST_WAIT_S, LOOK_S * waits)):
                    break
                self._start()
            self._closing.wait(LOOK_S)
        self._end()

    def _gives_up(self) -> bool:
        """Counts the end of a writer; True where another one would end the same way."""
        refused = self.process is not None and self.process.returncode == REFUSED
        self._failures = 0 if self.ring.statuses > self._statuses else self._failures + 1
        steady = time.monotonic() - self._begun_s > STEADY_S
        self._short = 0 if steady else min(16, self._short + 1)
        if not refused and self._failures <= RESTARTS:
            return False
        once(f"the writer of records ended {self.generation} times; recording stops")
        self.process = None
        return True

    def _start(self) -> None:
        if self.process is not None:
            logger.warning(
                "draftsmith: the writer of records ended with status %s and is started again",
                self.process.returncode,
            )
        self.ring.discard()
        self._begun_s, self._statuses = time.monotonic(), self.ring.statuses
        command = [sys.executable, "-m", "draftsmith.fleet.wire.writer"]
        command += [str(self.ring.descriptor), json.dumps(self.job)]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=[self.ring.descriptor],
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            once(f"the writer of records cannot be started ({error})")
        self.generation += 1

    def _end(self) -> None:
        process = self.process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_S)


def _environment() -> dict[str, str]:
    """The engine's own, with its import path, one thread, and no accelerator."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    return {**os.environ, **quiet}
