"""Messages of arrays in a ring: a kind, a number and arrays, laid out one after the other."""

from __future__ import annotations

import math
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


def message_size(specs: Sequence[Spec]) -> int:
    return _round(8 * (3 + 3 * len(specs))) + sum(_round(spec.nbytes) for spec in specs)


def begin(ring: Ring, kind: int, number: int, specs: Sequence[Spec]) -> list[np.ndarray] | None:
    """Writable arrays of a new message, which `ring.commit` publishes; None where it is full."""
    room = ring.reserve(message_size(specs))
    if room is None:
        return None
    head: list[int] = [kind, number, len(specs)]
    for spec in specs:
        head += [CODES[spec.dtype], spec.shape[0], spec.shape[1] if len(spec.shape) == 2 else -1]
    room[: 8 * len(head)].view(np.int64)[:] = head
    return _arrays(room, specs)


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
    return Arrays(kind, number, _arrays(room, specs))


def _round(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _arrays(room: np.ndarray, specs: Sequence[Spec]) -> list[np.ndarray]:
    arrays, offset = [], _round(8 * (3 + 3 * len(specs)))
    for spec in specs:
        values = room[offset : offset + spec.nbytes].view(spec.dtype)
        arrays.append(values.reshape(spec.shape))
        offset += _round(spec.nbytes)
    return arrays
