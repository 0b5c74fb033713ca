"""An index of the recent past of a text, or of many: where did the last few tokens occur before,
and what followed them?

Hash chains over a ring, as in LZ77 compressors: for each order o a table maps the hash of o
consecutive tokens to the newest position where they end, and every position points to the one
before it with the same hash. The oldest tokens are overwritten, so memory is bounded (about 70
bytes per token), a token costs a few operations, and nothing is ever searched in full. Hashes only
find candidates; what is believed is the tokens themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Lengths of context with a table of their own. Longer contexts are found among the occurrences of
# the next shorter order.
ORDERS = (1, 2, 4, 8)
# Occurrences of a context that are looked at, newest first: enough to rank what follows by
# frequency.
MAX_OCCURRENCES = 128
# Below this, Python's own numbers are faster than arrays.
FEW = 24
SEPARATOR = -1

WORD = (1 << 64) - 1
MULTIPLIER = 0x9E3779B97F4A7C15
MIX = 0xD6E8FEB86659FD93


class Occurrences(NamedTuple):
    """C earlier places of a context, newest first."""

    lengths: np.ndarray  # [C] how many tokens before the continuation agree with the context
    continuations: np.ndarray  # [C, K] the tokens that followed; SEPARATOR from where the text ends


class SuffixIndex:
    """Texts are appended one after another; the newest may be extended. `capacity` tokens, rounded
    up to a power of two."""

    def __init__(self, capacity: int, *, max_texts: int = 1):
        bits = max(6, (capacity - 1).bit_length())
        self.capacity, self.max_texts = 1 << bits, max_texts
        self._mask, self._shift = self.capacity - 1, 64 - bits
        self._text = np.zeros(self.capacity, dtype=np.int32)
        # Positions plus one, so that pages of zeros that were never touched mean "none".
        self._heads = [np.zeros(self.capacity, dtype=np.int64) for _ in ORDERS]
        self._previous = [np.zeros(self.capacity, dtype=np.int64) for _ in ORDERS]
        # Views that give Python's own numbers.
        self._cells = memoryview(self._text)
        self._links = [
            (memoryview(head), memoryview(link)) for head, link in zip(self._heads, self._previous)
        ]
        self._starts: deque[int] = deque()  # of the texts still held
        self.end = 0  # positions are never reused; slots are

    @property
    def oldest(self) -> int:
        """The first position that may be looked at."""
        return max(self._starts[0] if self._starts else self.end, self.end - self.capacity)

    @property
    def num_texts(self) -> int:
        return len(self._starts)

    def begin_text(self) -> None:
        """Starts a new text; beyond `max_texts` the oldest is forgotten."""
        if self.end > 0:
            self._cells[self.end & self._mask] = SEPARATOR
            self.end += 1
        self._starts.append(self.end)
        while len(self._starts) > self.max_texts or (
            len(self._starts) > 1 and self._starts[1] <= self.end - self.capacity
        ):
            self._starts.popleft()

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the newest text. Of more than the ring holds beside their context, the
        last ones."""
        tokens = tokens[-(self.capacity - ORDERS[-1]) :]
        if len(tokens) < FEW:
            for token in tokens:
                self._append(token)
        else:
            self._append_many(np.asarray(tokens, dtype=np.int32))

    def occurrences(self, context: Sequence[int], order: int, num_following: int) -> Occurrences:
        """Earlier places of the last `ORDERS[order]` tokens of `context`, but for the end of the
        newest text: nothing follows."""
        keys = _keys(context)
        places = self._chain(order, keys[order]) if order < len(keys) else []
        depth = len(context)
        offsets = np.arange(1 - depth, num_following + 1)
        positions = np.array(places, dtype=np.int64)[:, None] + offsets
        found = self._text[positions & self._mask]
        found[(positions < self.oldest) | (positions >= self.end)] = SEPARATOR
        agrees = found[:, depth - 1 :: -1] == np.asarray(context, dtype=np.int32)[::-1]
        lengths = np.where(agrees.all(axis=1), depth, agrees.argmin(axis=1))
        real = lengths >= ORDERS[order]  # not merely the same hash
        return Occurrences(lengths[real], found[real, depth:])

    def _chain(self, order: int, key: int) -> list[int]:
        heads, previous = self._links[order]
        oldest, last, mask = self.oldest, self.end - 1, self._mask
        places: list[int] = []
        place = heads[self._slot(key)] - 1
        while place >= oldest and len(places) < MAX_OCCURRENCES:
            if place != last:
                places.append(place)
            place = previous[place & mask] - 1
        return places

    def _slot(self, key: int) -> int:
        return (key * MIX & WORD) >> self._shift

    def _append(self, token: int) -> None:
        place = self.end
        self._cells[place & self._mask] = token
        self.end = place + 1
        known = min(ORDERS[-1], self.end - self._starts[-1])
        recent = [
            self._cells[position & self._mask] for position in range(self.end - known, self.end)
        ]
        for (heads, previous), key in zip(self._links, _keys(recent)):
            slot = self._slot(key)
            previous[place & self._mask] = heads[slot]
            heads[slot] = place + 1

    def _append_many(self, tokens: np.ndarray) -> None:
        first = self.end
        self._text[np.arange(first, first + len(tokens)) & self._mask] = tokens
        self.end = first + len(tokens)
        begin = max(self._starts[-1], first - ORDERS[-1] + 1)
        recent = self._text[np.arange(begin, self.end) & self._mask].astype(np.uint64)
        key = np.zeros(len(recent), dtype=np.uint64)
        power, done = 1, 0
        for order, size in enumerate(ORDERS):
            for back in range(done, size):
                key[back:] += recent[: len(recent) - back] * np.uint64(power)
                power = power * MULTIPLIER & WORD
            done = size
            places = np.arange(max(first, begin + size - 1), self.end)
            slots = (key[places - begin] * np.uint64(MIX)) >> np.uint64(self._shift)
            self._link(order, places, slots.astype(np.int64))

    def _link(self, order: int, places: np.ndarray, slots: np.ndarray) -> None:
        """Link positions as one after the other would: those of one slot point back to each other,
        the first to the head there."""
        if len(places) == 0:
            return
        sequence = np.argsort(slots, kind="stable")
        places, slots = places[sequence], slots[sequence]
        is_first = np.ones(len(slots), dtype=bool)
        is_first[1:] = slots[1:] != slots[:-1]
        before = np.where(is_first, self._heads[order][slots], np.roll(places, 1) + 1)
        self._previous[order][places & self._mask] = before
        is_last = np.roll(is_first, -1)
        self._heads[order][slots[is_last]] = places[is_last] + 1


def _keys(context: Sequence[int]) -> list[int]:
    """The hash of the last o tokens for each order o that `context` has tokens for."""
    keys, key, power = [], 0, 1
    for back in range(1, min(len(context), ORDERS[-1]) + 1):
        key = (key + context[-back] * power) & WORD
        power = power * MULTIPLIER & WORD
        if back in ORDERS:
            keys.append(key)
    return keys
