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
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from draftsmith.distill.buffer.buffer import BufferWriter, Screen
from draftsmith.distill.buffer.process import (
    DROPPED,
    LOST,
    SETTLED,
    TAKEN,
    UNTAPPED,
    WRITTEN,
    WriterJob,
)
from draftsmith.distill.buffer.record_messages import RecordMessage, parse, records_of
from draftsmith.distill.buffer.record_table import tokens_only
from draftsmith.errors import UserError
from draftsmith.record import RoundRecord
from draftsmith.shared_memory.child import NICE, REFUSED, end_of_engine
from draftsmith.shared_memory.ring import Ring

if TYPE_CHECKING:
    from draftsmith.distill.buffer.redaction import Redactor

logger = logging.getLogger("draftsmith.buffer")

# Between two looks into an empty ring.
LOOK_S = 0.05
# Messages that are read at once: rounds of the engine.
MOST = 16
MOST_BYTES = 16 << 20
# For a disk that refuses when the server has ended.
PATIENCE_S = 2.0


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

    def take(self) -> int:
        """Reads what is in the ring, `MOST` messages at most, and returns their number."""
        messages: list[RecordMessage] = []
        size = 0
        while len(messages) < MOST and size < MOST_BYTES and (room := self.ring.next()) is not None:
            size += room.nbytes
            messages.append(parse(room))
            self.ring.counts[TAKEN] += len(messages[-1].records)
            # Before anything is made of it: a record that ends this process is not read again.
            self.ring.release()
        for record in self._records(messages):
            self.buffer.put(record)
        return len(messages)

    def _records(self, messages: list[RecordMessage]) -> list[RoundRecord]:
        """Records of messages; one that nothing can be made of costs only itself."""
        try:
            return records_of(messages)
        except Exception:
            if len(messages) > 1:
                return [record for one in messages for record in self._records([one])]
            if self.failed == 0:
                logger.exception("records of a round cannot be read; such rounds are dropped")
            self.failed += len(messages[0].records)
            return []

    def leave(self) -> None:
        """Counts and share for the server."""
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
    """Write until `ended(seconds)`, which waits at most so long, is True and the ring is empty."""
    writer, over = RecordWriter(ring, job), False
    while True:
        taken = writer.take()
        writer.leave()
        if taken == 0:
            if over:
                break
            over = ended(LOOK_S)
    writer.close()


def main(descriptor: str, job: str) -> None:
    logging.basicConfig(level=logging.INFO, format="draftsmith: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        # What stops a group of processes stops the server, which answers its requests first.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    torch.set_num_threads(1)
    try:
        run(Ring(int(descriptor)), WriterJob(**json.loads(job)), end_of_engine())
    except UserError as error:
        logger.error("%s", error)
        sys.exit(REFUSED)
    except OSError as error:
        logger.error("buffer %s cannot be opened (%s)", WriterJob(**json.loads(job)).buffer, error)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
