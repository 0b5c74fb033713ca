"""Messages from an engine to its writer: a kind, a number and arrays, laid out one after the other
in the ring.

Legend: r requests of a step, n drafted positions, V vocabulary. Requests are named by handles,
numbers that are never used again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from draftsmith.fleet.wire.ring import ALIGN, Ring


class Kind(IntEnum):
    """Kind of a message; its number and its arrays."""

    # handle; meta (`RequestMeta` as JSON), prompt
    BEGIN = 0
    # step; meta (`StepMeta`), handles [r], counts of drafted tokens [r], drafted [n], then p and q
    # as `StepMeta` says
    POSITIONS = 1
    # step; handles [r], counts of sampled tokens [r], sampled tokens, all requests' after another
    TOKENS = 2
    # 0; handles
    END = 3
    # handle; all tokens with which a preempted request goes on
    RESUME = 4


class RequestMeta(NamedTuple):
    """Properties of a request that its records need."""

    id: str
    request_class: str
    share: float
    temperature: float
    top_k: int  # 0 for none
    top_p: float
    min_p: float
    seeded: bool
    adjusts: bool  # sampled by more than the four numbers above: no p and q
    max_tokens: int
    stops: list[int]  # tokens that end it

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class StepMeta(NamedTuple):
    """Meaning of the arrays behind the first three of `POSITIONS`.

    With `dtype` they are p [n, V], raw logits of that torch dtype, and q [n, V] or [0, 0]. Without,
    they are ids [n, 64], logprobs [n, 64] and tail, log norm, drafted [n, 3] of p, then the same of
    q or nothing. No q is a q that is one-hot.
    """

    draft_version: str
    weight_version: str
    dtype: str = ""
    q_is_probs: bool = False


KINDS = [np.dtype(name) for name in ("u1", "i4", "i8", "f4", "u2", "f8")]
CODES = {kind: code for code, kind in enumerate(KINDS)}


class Spec(NamedTuple):
    """Dtype and shape, of one or two dimensions, of an array of a message."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Message(NamedTuple):
    kind: Kind
    number: int
    arrays: list[np.ndarray]  # in the ring's memory: copies are taken of what is kept

    def meta(self, cls: Any) -> Any:
        """First array as `RequestMeta` or `StepMeta`."""
        return cls(*json.loads(self.arrays[0].tobytes()))


def meta_array(meta: tuple[Any, ...]) -> np.ndarray:
    return np.frombuffer(json.dumps(list(meta)).encode(), np.uint8)


def _round(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def message_size(specs: Sequence[Spec]) -> int:
    return _round(8 * (3 + 3 * len(specs))) + sum(_round(spec.nbytes) for spec in specs)


def begin(ring: Ring, kind: Kind, number: int, specs: Sequence[Spec]) -> list[np.ndarray] | None:
    """Writable arrays of a new message, which `ring.commit` publishes; None where it is full."""
    room = ring.reserve(message_size(specs))
    if room is None:
        return None
    head: list[int] = [kind, number, len(specs)]
    for spec in specs:
        head += [CODES[spec.dtype], spec.shape[0], spec.shape[1] if len(spec.shape) == 2 else -1]
    room[: 8 * len(head)].view(np.int64)[:] = head
    return _arrays(room, specs)


def send(ring: Ring, kind: Kind, number: int, arrays: Sequence[np.ndarray]) -> bool:
    """Write a whole message; False where the ring is full."""
    places = begin(ring, kind, number, [Spec(array.dtype, array.shape) for array in arrays])
    if places is None:
        return False
    for place, array in zip(places, arrays):
        place[...] = array
    ring.commit()
    return True


def parse(room: np.ndarray) -> Message:
    kind, number, count = (int(value) for value in room[:24].view(np.int64))
    rows = room[24 : 24 + 24 * count].view(np.int64).reshape(count, 3)
    specs = [
        Spec(KINDS[code], (first,) if second < 0 else (first, second))
        for code, first, second in rows.tolist()
    ]
    return Message(Kind(kind), number, _arrays(room, specs))


def _arrays(room: np.ndarray, specs: Sequence[Spec]) -> list[np.ndarray]:
    arrays, offset = [], _round(8 * (3 + 3 * len(specs)))
    for spec in specs:
        values = room[offset : offset + spec.nbytes].view(spec.dtype)
        arrays.append(values.reshape(spec.shape))
        offset += _round(spec.nbytes)
    return arrays
