"""Messages of arrays in a ring: a kind, a number and arrays, laid out one after the other."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftsmith.shared_memory.ring import ALIGN, Ring

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
