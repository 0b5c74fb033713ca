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
from itertools import accumulate
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
    Distributions,
    ProbArrays,
    RecordedRound,
    RecordedTaps,
    RecordHead,
    RoundRecord,
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


@dataclass
class Received:
    """p or q of a message: kind, positions of each record, arrays."""

    kind: str
    counts: list[int]
    arrays: list[np.ndarray]
    records: list[RoundRecord]

    @property
    def recorded(self) -> list[RoundRecord]:
        """The records that have positions here."""
        return [one for one, count in zip(self.records, self.counts) if count]


@dataclass
class RecordMessage:
    """Records whose p and q are still to be made."""

    records: list[RoundRecord]
    p: Received
    q: Received


def parse(room: np.ndarray) -> RecordMessage:
    """A message, free of the ring's memory."""
    head, *parts = (values.copy() for values in ring_arrays.parse(room).arrays)
    time_s, kinds, sent = marshal.loads(head)
    arrays = iter(parts)
    stored = [[next(arrays) for _ in range(NUM_ARRAYS[kind])] for kind in kinds]
    rows = [
        RoundRow._make(
            (_decoded(encoded), *fields, at and RecordedTaps._make((*at, next(arrays))), place)
        )
        for encoded, *fields, at, place in sent
    ]
    records = [row.record(time_s) for row in rows]
    counts = [len(row.drafted) if row.place >= 0 else 0 for row in rows]
    p, q = (Received(kind, counts, own, records) for kind, own in zip(kinds, stored))
    return RecordMessage(records, p, q)


def records_of(messages: Sequence[RecordMessage]) -> list[RoundRecord]:
    """Records of messages; the likeliest tokens of all that came as logits are found at once."""
    for name in ("p", "q"):
        received = [getattr(one, name) for one in messages]
        reduced = _reduced_together(
            [one for one in received if one.kind in DTYPES], is_p=name == "p"
        )
        for one in received:
            arrays, begin = reduced.get(id(one)) or (_without_logits(one), 0)
            for record, count in zip(one.records, one.counts, strict=True):
                part = Distributions(arrays, begin, begin + count) if count else []
                setattr(record, name, part)
                begin += count
    return [record for one in messages for record in one.records]


def _reduced_together(
    received: Sequence[Received], *, is_p: bool
) -> dict[int, tuple[ProbArrays, int]]:
    """Arrays of logits, and where those of each message begin in them, by its id."""
    groups: dict[tuple[str, int], list[Received]] = {}
    for one in received:
        groups.setdefault((one.kind, one.arrays[0].shape[1]), []).append(one)
    found: dict[int, tuple[ProbArrays, int]] = {}
    for (kind, _), members in groups.items():
        recorded = [record for one in members for record in one.recorded]
        logits = torch.from_numpy(np.concatenate([one.arrays[0] for one in members]))
        arrays = prob_arrays(
            logits.view(DTYPES[kind]),
            [token for record in recorded for token in record.drafted],
            [record.temperature for record in recorded for _ in record.drafted] if is_p else None,
        )
        begins = accumulate((sum(one.counts) for one in members), initial=0)
        found |= {id(one): (arrays, begin) for one, begin in zip(members, begins)}
    return found


def _without_logits(received: Received) -> ProbArrays:
    if received.kind != REDUCED:
        return ProbArrays.one_hot([one for record in received.recorded for one in record.drafted])
    return ProbArrays.of_columns(*received.arrays)
