"""Writer process beside a server: `python -m draftsmith.distill.buffer.process_writer DESCRIPTOR
JOB`.

Takes records from the ring and writes them through `BufferWriter`. It ends when the server does,
however it ends, after everything is written.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from draftsmith.child_process import NICE, REFUSED, end_of_engine
from draftsmith.distill.buffer.buffer import BufferWriter, Screen
from draftsmith.distill.buffer.process import (
    DROPPED,
    LOST,
    SETTLED,
    TAKEN,
    UNTAPPED,
    WRITTEN,
    WriterJob,
    parse,
)
from draftsmith.distill.buffer.record_table import tokens_only
from draftsmith.errors import UserError
from draftsmith.progress import set_up_logging
from draftsmith.record import RecordedRound, RoundRecord
from draftsmith.shared_ring import Ring

if TYPE_CHECKING:
    from draftsmith.distill.buffer.redaction import Redactor

logger = logging.getLogger("draftsmith.buffer")

# Between two looks into an empty ring.
LOOK_S = 0.05
# For a disk that refuses when the server has ended.
PATIENCE_S = 2.0
# Between two tries to open a buffer that is away.
RETRY_S = 1.0


class RingReader(Protocol):
    """Reading end of a ring, in a writer process."""

    def take(self) -> bool:
        """Reads a message; False where there is none."""
        ...

    def leave(self) -> None:
        """Leaves counts and share for the engine."""
        ...

    def close(self) -> None: ...


class RecordWriter:
    """Reading end of the ring, whose counts go on from those of the writer before."""

    def __init__(self, ring: Ring, job: WriterJob):
        self.ring = ring
        self.redactor = redactor(job)
        screens: list[Screen] = [] if self.redactor is None else [self.redactor]
        if not job.distributions:
            screens.append(lambda record: [tokens_only(record)])
        self.buffer = BufferWriter(job.buffer, screens=screens, share=job.share)
        counts = ring.counts
        counts[LOST] += counts[TAKEN] - counts[SETTLED]
        counts[SETTLED] = counts[TAKEN]
        self.failed = 0
        self.before = {name: int(counts[name]) for name in (WRITTEN, DROPPED, UNTAPPED)}

    def take(self) -> bool:
        room = self.ring.next()
        if room is None:
            return False
        round = parse(room)
        self.ring.counts[TAKEN] += len(round.rows)
        # Before anything is made of it: a record that ends this process is not read again.
        self.ring.release()
        for record in self._records(round):
            self.buffer.put(record)
        return True

    def _records(self, round: RecordedRound) -> list[RoundRecord]:
        """Records of a round; one that nothing can be made of costs only itself."""
        try:
            return round.records()
        except Exception:
            if self.failed == 0:
                logger.exception("records of a round cannot be read; such rounds are dropped")
            self.failed += len(round.rows)
            return []

    def leave(self) -> None:
        counts, buffer = self.ring.counts, self.buffer
        held = 0 if self.redactor is None else self.redactor.num_held
        counts[SETTLED] = counts[TAKEN] - buffer.num_queued - held
        counts[WRITTEN] = self.before[WRITTEN] + buffer.written
        counts[DROPPED] = self.before[DROPPED] + buffer.dropped + self.failed
        counts[UNTAPPED] = self.before[UNTAPPED] + buffer.untapped
        self.ring.share = buffer.share
        self.ring.leave_status(b"{}")

    def close(self) -> None:
        self.buffer.close(patience_s=PATIENCE_S)
        self.leave()


def redactor(job: WriterJob) -> Redactor | None:
    if job.redact is None:
        return None
    # They take longer to load than all the rest.
    from draftsmith.distill.buffer.redaction import Redactor, load_hook, mask_of
    from draftsmith.drafters.target.load import load_tokenizer

    tokenizer = load_tokenizer(job.tokenizer, trust_remote_code=job.trust_remote_code)
    return Redactor(load_hook(job.redact), tokenizer, mask_id=mask_of(tokenizer))


def run(ring: Ring, job: WriterJob, ended: Callable[[float], bool]) -> None:
    read_until(ended, partial(RecordWriter, ring, job), patience_s=PATIENCE_S)


def read_until(
    ended: Callable[[float], bool], make: Callable[[], RingReader], *, patience_s: float
) -> None:
    """Read until `ended(seconds)`, which waits at most so long, is True and the ring is empty."""
    reader, over = opened(ended, make, patience_s=patience_s), False
    while True:
        is_taken = reader.take()
        reader.leave()
        if not is_taken:
            if over:
                break
            over = ended(LOOK_S)
    reader.close()


def opened(
    ended: Callable[[float], bool], make: Callable[[], RingReader], *, patience_s: float
) -> RingReader:
    """Writer into a buffer that may be away now; what comes waits in the ring. Raises `OSError`
    where it stays away for `patience_s` after the end."""
    over_s, is_told = None, False
    while True:
        try:
            return make()
        except OSError as error:
            if not is_told:
                logger.warning("the buffer cannot be opened (%s); records wait", error)
            is_told = True
            if over_s is not None and time.monotonic() - over_s > patience_s:
                raise
        if over_s is not None:
            time.sleep(RETRY_S)
        elif ended(RETRY_S):
            over_s = time.monotonic()


def begin() -> None:
    """Take the place of a process that disturbs nothing: the engine and its requests go first."""
    set_up_logging()
    for number in (signal.SIGTERM, signal.SIGINT):
        # What stops a group of processes stops the server, which answers its requests first.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    torch.set_num_threads(1)


def end(work: Callable[[], None]) -> None:
    """Do the work of a process; what ends it is one sentence."""
    try:
        work()
    except UserError as error:
        logger.error("%s", error)
        sys.exit(REFUSED)
    except OSError as error:
        logger.error("the buffer cannot be opened (%s)", error)
        sys.exit(1)


def main(descriptor: str, job: str) -> None:
    begin()
    end(lambda: run(Ring(int(descriptor)), WriterJob(**json.loads(job)), end_of_engine()))


if __name__ == "__main__":
    main(*sys.argv[1:])
