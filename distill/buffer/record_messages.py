"""Round records as messages in a ring, each whole: a writer that is started anew reads on.

A message holds the records of one round of the engine. p and q are sent as logits where they are
not reduced yet, so that the sender only copies. n positions of a message, V vocabulary.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.kernels.sampling.logged import LoggedLogits, OneHot
from draftsmith.record import Distribution, Distributions, ProbArrays, RecordedTaps, RoundRecord
from draftsmith.shared_memory import arrays as ring_arrays
from draftsmith.shared_memory.arrays import Spec
from draftsmith.shared_memory.ring import Ring

FIELDS = tuple(name for name in RoundRecord.__dataclass_fields__ if name not in ("p", "q", "taps"))
_FIELDS_OF = operator.attrgetter(*FIELDS)
NOTHING, ONE_HOT, REDUCED = "", "one-hot", "reduced"
# torch's dtypes of logits, and numpy's of the same size
LOGITS = {"float32": "f4", "bfloat16": "u2", "float16": "u2"}
NUM_ARRAYS = {NOTHING: 0, ONE_HOT: 0, REDUCED: 3, **dict.fromkeys(LOGITS, 1)}


class Part(NamedTuple):
    """Array of a message, and what writes it there."""

    spec: Spec
    fill: Callable[[np.ndarray], None]


def part_of(array: np.ndarray) -> Part:
    return Part(Spec(array.dtype, array.shape), lambda place: np.copyto(place, array))


class Span:
    """p, or q, of a message's records: neighbours in the arrays of one source."""

    def __init__(self) -> None:
        self.counts: list[int] = []  # positions of each record
        self.source: Callable[[], ProbArrays] | None = None
        self.begin = self.end = 0

    def continues(self, part: Sequence[Distribution]) -> bool:
        if len(part) == 0 or self.source is None:
            return True
        source, begin, _ = Distributions.of(part).part
        return source is self.source and begin == self.end

    def add(self, part: Sequence[Distribution]) -> None:
        self.counts.append(len(part))
        if len(part):
            source, begin, self.end = Distributions.of(part).part
            if self.source is None:
                self.source, self.begin = source, begin

    def sent(self, *, raw: bool) -> tuple[str, list[Part]]:
        """Kind, and arrays [n, ...]."""
        source = self.source
        if source is None:
            return NOTHING, []
        if isinstance(source, OneHot):
            return ONE_HOT, []
        if raw and isinstance(source, LoggedLogits):
            kind = str(source.dtype).removeprefix("torch.")
            if kind in LOGITS:
                shape = (self.end - self.begin, source.vocab_size)
                return kind, [Part(Spec(np.dtype(LOGITS[kind]), shape), self._copy_logits)]
        arrays = source().slice(self.begin, self.end)
        rest = np.stack([arrays.tail, arrays.log_norms, arrays.drafted_or_nan], axis=1)
        return REDUCED, [part_of(arrays.ids), part_of(arrays.logprobs), part_of(rest)]

    def _copy_logits(self, place: np.ndarray) -> None:
        assert isinstance(self.source, LoggedLogits) and self.source.dtype is not None
        bits = place.view(np.int16) if place.dtype == np.uint16 else place
        self.source.copy_into(torch.from_numpy(bits).view(self.source.dtype), self.begin)


class Batch:
    """Records of one message."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []
        self.p, self.q = Span(), Span()

    def continues(self, record: RoundRecord) -> bool:
        """True when the record's p and q follow those of the records before."""
        return self.p.continues(record.p) and self.q.continues(record.q)

    def add(self, record: RoundRecord) -> None:
        self.records.append(record)
        self.p.add(record.p)
        self.q.add(record.q)

    def send(self, ring: Ring) -> bool:
        """Write a message; where there is no room for logits, they are reduced first. False where
        the ring is full."""
        return self._send(ring, raw=True) or self._send(ring, raw=False)

    def without_taps(self) -> int:
        """Leaves the hidden states out and returns the number of records that had some."""
        tapped = [record for record in self.records if record.taps is not None]
        for record in tapped:
            record.taps = None
        return len(tapped)

    def _send(self, ring: Ring, *, raw: bool) -> bool:
        p_kind, p = self.p.sent(raw=raw)
        q_kind, q = self.q.sent(raw=raw)
        taps = [record.taps for record in self.records]
        meta = [
            list(map(_FIELDS_OF, self.records)),
            [p_kind, self.p.counts],
            [q_kind, self.q.counts],
            [one and [one.layers, one.begin] for one in taps],
        ]
        head = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        parts = [part_of(head), *p, *q, *[part_of(one.values) for one in taps if one is not None]]
        places = ring_arrays.begin(ring, 0, len(self.records), [part.spec for part in parts])
        if places is None:
            return False
        for part, place in zip(parts, places):
            part.fill(place)
        ring.commit()
        return True


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
class Message:
    """Records whose p and q are still to be made."""

    records: list[RoundRecord]
    p: Received
    q: Received


def parse(room: np.ndarray) -> Message:
    """A message, free of the ring's memory."""
    meta, *parts = (array.copy() for array in ring_arrays.parse(room).arrays)
    fields, p, q, taps = json.loads(meta.tobytes())
    arrays = iter(parts)
    records = [RoundRecord(**dict(zip(FIELDS, values, strict=True))) for values in fields]
    p_received, q_received = (
        Received(kind, counts, [next(arrays) for _ in range(NUM_ARRAYS[kind])], records)
        for kind, counts in (p, q)
    )
    for record, tapped in zip(records, taps, strict=True):
        if tapped is not None:
            layers, begin = tapped
            record.taps = RecordedTaps(tuple(layers), begin, next(arrays))
    return Message(records, p_received, q_received)


def records_of(messages: Sequence[Message]) -> list[RoundRecord]:
    """Records of messages; the likeliest tokens of all that came as logits are found at once."""
    for name in ("p", "q"):
        received = [getattr(one, name) for one in messages]
        sources = _sources([one for one in received if one.kind in LOGITS], is_p=name == "p")
        for one in received:
            source, begin = sources.get(id(one)) or (_without_logits(one), 0)
            for record, count in zip(one.records, one.counts, strict=True):
                part = Distributions(source, begin, begin + count) if count else []
                setattr(record, name, part)
                begin += count
    return [record for one in messages for record in one.records]


def _sources(
    received: Sequence[Received], *, is_p: bool
) -> dict[int, tuple[Callable[[], ProbArrays], int]]:
    """Arrays of logits, and where those of each message begin in them, by its id."""
    groups: dict[tuple[str, int], list[Received]] = {}
    for one in received:
        groups.setdefault((one.kind, one.arrays[0].shape[1]), []).append(one)
    found: dict[int, tuple[Callable[[], ProbArrays], int]] = {}
    for (kind, _), members in groups.items():
        recorded = [record for one in members for record in one.recorded]
        logits = torch.from_numpy(np.concatenate([one.arrays[0] for one in members]))
        source = LoggedLogits(
            logits.view(getattr(torch, kind)),
            None,
            [token for record in recorded for token in record.drafted],
            [record.temperature for record in recorded for _ in record.drafted] if is_p else None,
        )
        source()
        begins = accumulate((sum(one.counts) for one in members), initial=0)
        found |= {id(one): (source, begin) for one, begin in zip(members, begins)}
    return found


def _without_logits(received: Received) -> Callable[[], ProbArrays]:
    if received.kind != REDUCED:
        return OneHot([token for record in received.recorded for token in record.drafted])
    ids, logprobs, rest = received.arrays
    tail, log_norms, of_drafted = rest.T.copy()
    made = ProbArrays(ids, logprobs, tail, log_norms, of_drafted)
    return lambda: made
