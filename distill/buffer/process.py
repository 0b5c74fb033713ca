"""Server's side of a writer process: a sink that copies records into shared memory and goes on."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

from draftsmith.distill.buffer import buffer
from draftsmith.distill.buffer.folder import ShardFolder
from draftsmith.distill.buffer.forget import forget
from draftsmith.distill.buffer.record_messages import send
from draftsmith.kernels.sampling import logged_compiled
from draftsmith.record import RecordedRound, SinkCounts
from draftsmith.shared_memory.child import CAPACITY, Child
from draftsmith.shared_memory.ring import Ring

logger = logging.getLogger("draftsmith.buffer")

WRITER = "draftsmith.distill.buffer.process_writer"
# Places in the ring's counts: records that writers took from it; those of them that were written,
# dropped, and lost with writers that were killed; those without their hidden states; and records
# that are in no writer's memory any more.
TAKEN, WRITTEN, DROPPED, LOST, UNTAPPED, SETTLED = range(6)
# How long a server that stops waits for what is still to be written.
CLOSE_S = 60.0


@dataclass(frozen=True)
class WriterJob:
    """Work of a writer, as its process is given it.

    Args:
        tokenizer: folder or Hub id of the target, for `redact`.
    """

    buffer: str
    share: float = 1.0
    distributions: bool = True
    redact: str | None = None
    tokenizer: str = ""
    trust_remote_code: bool = False


class ProcessWriter:
    """`draftsmith.record.Sink` whose `put_round` copies records into shared memory. A process
    beside the server, of lower priority, finds the likeliest tokens and writes shards as
    `BufferWriter` does.

    The records of a round are copied at its end. Where their logits find no room, they are reduced
    there; where they find none then, they are dropped and counted. A ring that is more than half
    full takes no new requests. A killed writer is started again and reads on: what it had taken and
    not written is lost, about a second of traffic (with `redact`, the texts of unfinished
    requests), and counted. A killed server loses at most its last round.
    """

    def __init__(self, job: WriterJob, *, capacity: int = CAPACITY):
        self.folder = ShardFolder(job.buffer)
        self.folder.make()
        self.dropped = self.untapped = 0
        # For the process, and for rounds of a full ring.
        logged_compiled.prepare()
        self.child = Child(
            WRITER, dataclasses.asdict(job), share=job.share, capacity=capacity, resumes=True
        )
        self.ring.touch()

    @property
    def ring(self) -> Ring:
        return self.child.ring

    @property
    def share(self) -> float:
        is_full = self.ring.used > self.ring.capacity // 2
        return 0.0 if is_full or self.child.gave_up else self.ring.share

    @property
    def counts(self) -> SinkCounts:
        counts = self.ring.counts
        return SinkCounts(
            written=int(counts[WRITTEN]),
            dropped=self.dropped + int(counts[DROPPED]),
            lost=int(counts[LOST]),
            untapped=self.untapped + int(counts[UNTAPPED]),
        )

    def put_round(self, round: RecordedRound) -> None:
        if send(self.ring, round):
            return
        tapped = sum(row.taps is not None for row in round.rows)
        bare = round._replace(rows=[row._replace(taps=None) for row in round.rows])
        if tapped and send(self.ring, bare):
            self.untapped += tapped
        else:
            self.dropped += len(round.rows)

    def forget(self, answer: str) -> int:
        """As `BufferWriter.forget`: the writer reads the mark."""
        return forget(self.folder, answer, settle_s=buffer.SETTLE_S)

    def close(self) -> None:
        """Wait until everything is written, at most `CLOSE_S`; a slower writer goes on alone."""
        self.child.close(patience_s=CLOSE_S)
        if self.child.alive:
            logger.error("buffer %s hangs; its writer goes on alone", self.folder.url)
