"""Bounded ring of messages in memory that an engine shares with a writer process: one writes, one
reads, neither waits. A message of arrays is a kind, a number and the arrays, one after the other.

The memory is a file without a name, which ends with the last process that has it open, however
that process ends. Layout in bytes: the header's numbers, then a status of the reader, then
messages. A message is contiguous: one that does not fit before the end begins at 0 again. The
counts of bytes written and read only grow; an offset is such a count modulo the capacity.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ALIGN = 16
HEADER = 4096
STATUS = 64 << 10
DATA = HEADER + STATUS
# Numbers of the header; behind them are counts that the ends agree on.
WRITTEN, READ, SHARE, CAPACITY, STATUS_TURN, STATUS_SIZE, COUNTS = range(7)
# In place of a message's size: the rest of the ring is unused.
SKIP = -1


def shared_file(size: int) -> int:
    """Descriptor of a nameless file of `size` bytes, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("draftsmith-ring")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class Ring:
    """One end of a ring. Each method belongs to the writing or to the reading end.

    Args:
        descriptor: of a file from `shared_file`.
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        # A number of a memory view takes a tenth of the time of an array's.
        self.view = memoryview(self.memory)
        self.words = self.view.cast("q")
        self.numbers, self.floats = self.words[: HEADER // 8], self.view[:HEADER].cast("d")
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.address = self.bytes.ctypes.data
        # Of the reading ends, one after another: they outlive each of them.
        self.counts = self.numbers[COUNTS:]
        # Taken and given back around each publication: a lock's atomic operations keep the order of
        # plain stores on processors that do not keep it by themselves.
        self._order = threading.Lock()
        self._pending = 0
        self._after_read = 0

    @classmethod
    def create(cls, capacity: int, share: float = 1.0) -> Ring:
        capacity = max(ALIGN * 2, capacity // ALIGN * ALIGN)
        ring = cls(shared_file(DATA + capacity))
        ring.numbers[CAPACITY] = capacity
        ring.floats[SHARE] = share
        return ring

    @property
    def capacity(self) -> int:
        return self.numbers[CAPACITY]

    @property
    def used(self) -> int:
        """Bytes that are written and not yet read."""
        return self.numbers[WRITTEN] - self.numbers[READ]

    @property
    def share(self) -> float:
        """Share of new requests that the reader has room for."""
        return self.floats[SHARE]

    @share.setter
    def share(self, value: float) -> None:
        self.floats[SHARE] = value

    # The writing end.

    def touch(self) -> None:
        """Take all memory from the system now, so that no message waits for a page of it."""
        self.bytes[:: mmap.PAGESIZE] |= 0

    def place(self, size: int) -> int | None:
        """Offset in the memory of room [size] for one message, which `commit` publishes; None where
        it is full."""
        numbers = self.numbers
        whole = ALIGN + -(-size // ALIGN) * ALIGN
        written, capacity = numbers[WRITTEN], numbers[CAPACITY]
        offset = written % capacity
        left = capacity - offset
        skipped = left if whole > left else 0
        if whole + skipped > capacity - (written - numbers[READ]):
            return None
        if skipped:
            self.words[(DATA + offset) // 8] = SKIP
            offset = 0
        self.words[(DATA + offset) // 8] = size
        self._pending = written + skipped + whole
        return DATA + offset + ALIGN

    def commit(self) -> None:
        self._publish(WRITTEN, self._pending)

    def discard(self) -> None:
        """Drop everything unread, for a new reader."""
        self._publish(READ, self.numbers[WRITTEN])

    # The reading end.

    def next(self) -> np.ndarray | None:
        """Oldest message [size] uint8, valid until `release`; None where there is none."""
        while True:
            read, capacity = self.numbers[READ], self.capacity
            if read == self.numbers[WRITTEN]:
                return None
            with self._order:
                offset = read % capacity
                size = self.words[(DATA + offset) // 8]
            if size == SKIP:
                self._publish(READ, read + capacity - offset)
                continue
            self._after_read = read + ALIGN + -(-size // ALIGN) * ALIGN
            begin = DATA + offset + ALIGN
            return self.bytes[begin : begin + size]

    def release(self) -> None:
        self._publish(READ, self._after_read)

    @property
    def statuses(self) -> int:
        """Number of statuses that were left so far."""
        return self.numbers[STATUS_TURN] // 2

    def leave_status(self, data: bytes) -> None:
        """Replace the status; a longer one than there is room for is left out."""
        if len(data) > STATUS:
            return
        # Odd while it is being written, and after a writer that was killed meanwhile.
        turn = self.numbers[STATUS_TURN] // 2 * 2
        self._publish(STATUS_TURN, turn + 1)
        self.numbers[STATUS_SIZE] = len(data)
        self.bytes[HEADER : HEADER + len(data)] = np.frombuffer(data, np.uint8)
        self._publish(STATUS_TURN, turn + 2)

    def status(self) -> bytes | None:
        """Latest status; None where there is none or where it is being written right now."""
        turn = self.numbers[STATUS_TURN]
        with self._order:
            data = self.bytes[HEADER : HEADER + self.numbers[STATUS_SIZE]].tobytes()
        return data if turn and turn % 2 == 0 and turn == self.numbers[STATUS_TURN] else None

    def _publish(self, number: int, value: int) -> None:
        with self._order:
            pass
        with self._order:
            self.numbers[number] = value


KINDS = [np.dtype(name) for name in ("u1", "i4", "i8", "f4", "u2", "f8")]
CODES = {kind: code for code, kind in enumerate(KINDS)}


class Spec(NamedTuple):
    """Dtype and shape, of one or two dimensions, of an array of a message."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Arrays(NamedTuple):
    """A message as it is read."""

    kind: int
    number: int
    arrays: list[np.ndarray]  # in the ring's memory: copies are taken of what is kept


class Room(NamedTuple):
    """Code of a dtype, two dimensions, the second -1 where there is one, and bytes of an array."""

    code: int
    first: int
    second: int
    nbytes: int


def room_of(spec: Spec) -> Room:
    shape = spec.shape
    return Room(CODES[spec.dtype], shape[0], shape[1] if len(shape) == 2 else -1, spec.nbytes)


def place(ring: Ring, kind: int, number: int, rooms: Sequence[Room]) -> list[int] | None:
    """Offsets in the ring's memory of the arrays of a new message, which `ring.commit` publishes;
    None where it is full. Makes no array."""
    head = [kind, number, len(rooms)]
    offset = _round(8 * (3 + 3 * len(rooms)))
    offsets = []
    for code, first, second, nbytes in rooms:
        head += code, first, second
        offsets.append(offset)
        offset += _round(nbytes)
    begin = ring.place(offset)
    if begin is None:
        return None
    struct.pack_into(f"={len(head)}q", ring.memory, begin, *head)
    return [begin + one for one in offsets]


def begin(ring: Ring, kind: int, number: int, specs: Sequence[Spec]) -> list[np.ndarray] | None:
    """Writable arrays of a new message, which `ring.commit` publishes; None where it is full."""
    offsets = place(ring, kind, number, [room_of(spec) for spec in specs])
    if offsets is None:
        return None
    return [
        np.ndarray(spec.shape, spec.dtype, ring.memory, offset)
        for spec, offset in zip(specs, offsets)
    ]


def send(ring: Ring, kind: int, number: int, arrays: Sequence[np.ndarray]) -> bool:
    """Write a whole message; False where the ring is full."""
    places = begin(ring, kind, number, [Spec(array.dtype, array.shape) for array in arrays])
    if places is None:
        return False
    for place, array in zip(places, arrays):
        place[...] = array
    ring.commit()
    return True


def parse(room: np.ndarray) -> Arrays:
    kind, number, count = (int(value) for value in room[:24].view(np.int64))
    rows = room[24 : 24 + 24 * count].view(np.int64).reshape(count, 3)
    specs = [
        Spec(KINDS[code], (first,) if second < 0 else (first, second))
        for code, first, second in rows.tolist()
    ]
    arrays, offset = [], _round(8 * (3 + 3 * count))
    for spec in specs:
        values = room[offset : offset + spec.nbytes].view(spec.dtype)
        arrays.append(values.reshape(spec.shape))
        offset += _round(spec.nbytes)
    return Arrays(kind, number, arrays)


def _round(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
