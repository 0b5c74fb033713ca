"""Server's side of a writer process: a sink that copies records into shared memory and goes on; and
records as messages there, each whole, so that a writer that is started anew reads on.

A message holds the records of one round of the engine. p and q are sent as logits where they are
not reduced yet, so that the sender only copies. What the records of a request share is encoded once
and copied into each of its messages. n positions of a message, V vocabulary.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import marshal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from draftsmith import shared_ring as ring_arrays
from draftsmith.child_process import CAPACITY, Child
from draftsmith.distill.buffer import buffer
from draftsmith.distill.buffer.folder import ShardFolder, forget
from draftsmith.kernels.sampling.logged import (
    COPIED,
    Copy,
    LoggedRound,
    prepare_arrays,
    prob_arrays,
)
from draftsmith.record import (
    ProbArrays,
    RecordedRound,
    RecordedTaps,
    RecordHead,
    RoundRow,
    SinkCounts,
)
from draftsmith.shared_ring import CODES, Ring, Room, Spec, room_of

logger = logging.getLogger("draftsmith.buffer")
WRITER = "draftsmith.distill.buffer.process_writer"
# Places in the ring's counts: records that writers took from it; those of them that were written,
# dropped, and lost with writers that were killed; those without their hidden states; and records
# that are in no writer's memory any more.
TAKEN, WRITTEN, DROPPED, LOST, UNTAPPED, SETTLED = range(6)
# How long a server that stops waits for what is still to be written.
CLOSE_S = 60.0
NOTHING, ONE_HOT, REDUCED = "", "one-hot", "reduced"
# Kinds of logits by torch's dtype, each with the code of an array of numbers of its size.
LOGITS = {
    dtype: (
        str(dtype).removeprefix("torch."),
        CODES[np.dtype("f4" if dtype.itemsize == 4 else "u2")],
    )
    for dtype in COPIED
}
DTYPES = {kind: dtype for dtype, (kind, _) in LOGITS.items()}
NUM_ARRAYS = {NOTHING: 0, ONE_HOT: 0, REDUCED: 3, **dict.fromkeys(DTYPES, 1)}
BYTES = CODES[np.dtype("u1")]


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
    not written is lost, about a second of traffic, 20 s and 512 records at most into an object
    store (with `redact`, the texts of unfinished requests), and counted. A killed server loses at
    most its last round.
    """

    def __init__(self, job: WriterJob, *, capacity: int = CAPACITY):
        self.folder = ShardFolder(job.buffer)
        self.folder.make()
        self.dropped = self.untapped = 0
        # For the process, and for rounds of a full ring.
        prepare_arrays()
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


class ArrayPart(NamedTuple):
    """Array of a message, and what writes it to an address."""

    room: Room
    fill: Callable[[int], None]


def part_of(values: np.ndarray) -> ArrayPart:
    whole = np.ascontiguousarray(values)
    room = room_of(Spec(whole.dtype, whole.shape))
    return ArrayPart(room, lambda address: _copy_array(address, whole))


def _copy_array(address: int, values: np.ndarray) -> None:
    ctypes.memmove(address, values.ctypes.data, values.nbytes)


def send(ring: Ring, round: RecordedRound) -> bool:
    """Write a message; where there is no room for logits, they are reduced first. False where the
    ring is full."""
    probed = [row for row in round.rows if row.place >= 0]
    if not probed or round.logits is None:
        return _send(ring, round, NOTHING, NOTHING, [])
    copies = round.logits.copies(probed) if isinstance(round.logits, LoggedRound) else None
    if copies is not None:
        (p_kind, p), (q_kind, q) = map(_copied, copies)
        if _send(ring, round, p_kind, q_kind, [*p, *q]):
            return True
    (p_kind, p), (q_kind, q) = map(_reduced, round.logits.arrays(probed))
    return _send(ring, round, p_kind, q_kind, [*p, *q])


def _copied(copy: Copy | None) -> tuple[str, list[ArrayPart]]:
    """Kind, and logits [n, V] to copy."""
    if copy is None:
        return ONE_HOT, []
    kind, code = LOGITS[copy.table.dtype]
    return kind, [ArrayPart(Room(code, copy.num_rows, copy.size, copy.nbytes), copy.into)]


def _reduced(made: ProbArrays | None) -> tuple[str, list[ArrayPart]]:
    """Kind, and arrays [n, ...] of what is stored."""
    if made is None:
        return ONE_HOT, []
    return REDUCED, [part_of(values) for values in made.columns]


def _send(
    ring: Ring, round: RecordedRound, p_kind: str, q_kind: str, parts: list[ArrayPart]
) -> bool:
    head = _head(round, (p_kind, q_kind))
    taps = [part_of(row.taps.values) for row in round.rows if row.taps is not None]
    parts = [*parts, *taps]
    rooms = [Room(BYTES, len(head), -1, len(head)), *[part.room for part in parts]]
    places = ring_arrays.place(ring, 0, len(round.rows), rooms)
    if places is None:
        return False
    at = places[0]
    ring.view[at : at + len(head)] = head
    for place, part in zip(places[1:], parts):
        part.fill(ring.address + place)
    ring.commit()
    return True


def _head(round: RecordedRound, kinds: tuple[str, str]) -> bytes:
    """All of a message but its arrays: of states, their layers and their first position."""
    rows = [
        (row.head.encoded, *row[1:-2], None if row.taps is None else row.taps[:2], row.place)
        for row in round.rows
    ]
    return marshal.dumps((round.time_s, kinds, rows))


@lru_cache(maxsize=4096)  # of every record of every running request
def _decoded(head: bytes) -> RecordHead:
    return RecordHead.decoded(head)


class SentLogits(NamedTuple):
    """`draftsmith.record.RoundLogits` of a message."""

    p_kind: str
    q_kind: str
    parts: list[np.ndarray]  # of p, then of q

    def arrays(self, rows: Sequence[RoundRow]) -> tuple[ProbArrays, ProbArrays | None]:
        tokens = [token for row in rows for token in row.drafted]
        temperatures = [row.head.temperature for row in rows for _ in row.drafted]
        of_p = NUM_ARRAYS[self.p_kind]
        p = _made(self.p_kind, self.parts[:of_p], tokens, temperatures)
        if self.q_kind == ONE_HOT:
            return p, None
        return p, _made(self.q_kind, self.parts[of_p:], tokens)


def _made(
    kind: str,
    parts: Sequence[np.ndarray],
    tokens: Sequence[int],
    temperatures: Sequence[float] | None = None,
) -> ProbArrays:
    if kind == REDUCED:
        return ProbArrays.of_columns(*parts)
    return prob_arrays(torch.from_numpy(parts[0]).view(DTYPES[kind]), tokens, temperatures)


def parse(room: np.ndarray) -> RecordedRound:
    """The round of a message, free of the ring's memory."""
    head, *parts = (values.copy() for values in ring_arrays.parse(room).arrays)
    time_s, (p_kind, q_kind), sent = marshal.loads(head)
    num_logits = NUM_ARRAYS[p_kind] + NUM_ARRAYS[q_kind]
    taps = iter(parts[num_logits:])
    rows = [
        RoundRow._make(
            (_decoded(encoded), *fields, at and RecordedTaps._make((*at, next(taps))), place)
        )
        for encoded, *fields, at, place in sent
    ]
    logits = None if p_kind == NOTHING else SentLogits(p_kind, q_kind, parts[:num_logits])
    return RecordedRound(rows, time_s, logits)
