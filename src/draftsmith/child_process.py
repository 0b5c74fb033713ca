"""Writer process beside an engine: started, watched and ended with it, and the ring that leads to
it.

The engine waits for nothing here: the process is started and watched by a thread. It is started
again whenever it ends, later each time where it ends soon. Where it ends `RESTARTS` + 1 times in a
row before it has read anything, recording stops, which is logged once. The writer reads an end of
file where its engine died, however it died, and flushes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from draftsmith.shared_ring import Ring

logger = logging.getLogger("draftsmith.child_process")

NICE = 5
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

    `generation` counts its starts. It is 0 before the first start, and `alive` is False while there
    is none. `gave_up` is True where none is started any more.

    Args:
        module: run as `python -m MODULE DESCRIPTOR JOB`.
        job: JSON values.
        resumes: a new process reads on where the one before died; otherwise what was sent to that
            one is dropped.
    """

    def __init__(
        self,
        module: str,
        job: Mapping[str, Any],
        *,
        share: float = 1.0,
        capacity: int = CAPACITY,
        resumes: bool = False,
    ) -> None:
        self.module, self.job, self.resumes = module, dict(job), resumes
        self.ring = Ring.create(capacity, share)
        self.generation = 0
        self.gave_up = False
        self.process: subprocess.Popen[bytes] | None = None
        self._failures = 0  # starts in a row that left no status
        self._short = 0  # starts in a row that ended before `STEADY_S`
        self._begun_s, self._statuses = 0.0, 0
        self._patience_s = CLOSE_S
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="draftsmith-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def _runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def status(self) -> dict[str, Any]:
        """Latest status of the writer, read without waiting; `{}` before the first."""
        data = self.ring.status()
        return json.loads(data) if data else {}

    def close(self, *, patience_s: float | None = None) -> None:
        """End the writer, which flushes first, and wait at most `patience_s` for it, by default
        `CLOSE_S`."""
        self._patience_s = CLOSE_S if patience_s is None else patience_s
        self._closing.set()
        self._thread.join(LOOK_S + self._patience_s)

    def _watch(self) -> None:
        while not self._closing.is_set():
            if not self._runs:
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
        logger.warning(
            "draftsmith: the writer of records ended %d times; recording stops", self.generation
        )
        self.gave_up, self.process = True, None
        return True

    def _start(self) -> None:
        if self.process is not None:
            logger.warning(
                "draftsmith: the writer of records ended with status %s and is started again",
                self.process.returncode,
            )
        if not self.resumes:
            self.ring.discard()
        self._begun_s, self._statuses = time.monotonic(), self.ring.statuses
        command = [sys.executable, "-m", self.module]
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
            if self._failures == 0:
                logger.warning("draftsmith: the writer of records cannot be started (%s)", error)
        self.generation += 1

    def _end(self) -> None:
        if self.resumes and self.ring.used and not self._runs:
            self._start()  # for what the one before has left
        process = self.process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._patience_s)


def _environment() -> dict[str, str]:
    """The engine's own, with its import path, one thread, and no accelerator."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    return {**os.environ, **quiet}


def end_of_engine() -> Callable[[float], bool]:
    """For a writer: a function that waits at most the given seconds and is True once the engine has
    ended. Standard input ends with it; a copy of the pipe may outlive it, in a process that it
    forked."""
    engine = os.getppid()

    def ended(seconds: float) -> bool:
        # No bytes come here: what can be read is the end.
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(readable) or os.getppid() != engine

    return ended
