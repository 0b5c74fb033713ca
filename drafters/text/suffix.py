"""Suffix decoding (arXiv 2411.04975): drafts what followed what the text ends with, in this
request, in those that have finished and in stored answers. No weights, no cache, one-hot q.

Of the newest places of a context the one that agrees with most tokens, L, offers the token behind
it. With n places, m of which have that token behind them, it is kept with a chance of about
m / (n + caution / L). The likeliest offer is drafted, and another one behind it in the same way,
until the chance that all are kept falls below what a draft is worth.

The index: hash chains over a ring, as in LZ77 compressors. For each order o a table maps the hash
of o consecutive tokens to the newest position where they end, and every position points to the one
before it with the same hash. The oldest tokens are overwritten, so memory is bounded (about 70
bytes per token), a token costs a few operations, and nothing is ever searched in full. Hashes only
find candidates; what is believed is the tokens themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.text.answers import CAUTION, SEPARATOR, WORD, AnswerTable, keys_of, powers
from draftsmith.drafters.weights import ReadBytes
from draftsmith.kernels.attention.pool import PagedPool

# The part of a request's own text that is searched: about 9 MB of index where a text is as long.
WINDOW = 131_072
LONGEST = 16  # context
SEEN = 4  # newest places of a context that are looked at
OWN_CAUTION = 2.5  # of the request's own text, see `CAUTION`
# Survival of a draft: where the control names none, and the most that it may ask of a row alone: a
# control that is mistaken is corrected by drafts, of which some other row nearly always has one.
LEAST, MOST_ALONE = 0.1, 0.3


class SuffixDraft(NamedTuple):
    tokens: list[int]
    score: float  # tokens expected to be accepted


class Suffix:
    """Suffix decoding.

    Args:
        max_cached_requests: finished requests that are searched, the oldest forgotten first; 0
            shares nothing.
        max_cached_tokens: tokens of these held at most.
        answers: stored ones, never forgotten.
    """

    family = "suffix"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        max_cached_requests: int = 10_000,
        max_cached_tokens: int = 1 << 21,
        answers: AnswerTable | None = None,
    ):
        self.keeps_finished, self.answers = max_cached_requests > 0, answers
        self.shared = SuffixIndex(max_cached_tokens, max_texts=max(1, max_cached_requests))
        self._own: dict[str, OwnText] = {}

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> PagedPool | None:
        return None

    def propose(self, inputs: DraftInputs) -> Proposal:
        drafts = [draft.tokens for draft in self.drafts(inputs)]
        width, device = int(inputs.num_draft.max()), inputs.tokens.device
        tokens = torch.tensor(
            [draft + [-1] * (width - len(draft)) for draft in drafts],
            dtype=torch.int64,
            device=device,
        )
        lengths = torch.tensor([len(draft) for draft in drafts], device=device)
        return Proposal(tokens=tokens.view(len(drafts), width), lengths=lengths, logits=None)

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        return last + 1

    def read_bytes(self) -> ReadBytes:
        return ReadBytes(0, 0)

    def drafts(self, inputs: DraftInputs) -> list[SuffixDraft]:
        names = inputs.request_ids or [""] * len(inputs.histories)
        shares = inputs.shares or [True] * len(inputs.histories)
        rows = zip(names, inputs.histories, inputs.num_draft.tolist(), shares, strict=True)
        most = MOST_ALONE if len(names) == 1 else 1.0
        least = max(LEAST, min(inputs.least_survival, most))
        return [self._draft(name, history, k, shared, least) for name, history, k, shared in rows]

    def finished(self, request_id: str, tokens: list[int]) -> None:
        self._own.pop(request_id, None)
        if tokens and self.keeps_finished:
            self.shared.begin_text()
            self.shared.extend(tokens)

    def _draft(
        self, name: str, history: list[int], k: int, shared: bool, least: float
    ) -> SuffixDraft:
        tokens: list[int] = []
        score, survival = 0.0, 1.0
        if k == 0:
            return SuffixDraft(tokens, score)
        own = self._own.setdefault(name, OwnText()) if name else OwnText()
        own.read(history)
        context = history[-LONGEST:]
        while len(tokens) < k:
            token, chance = self._likeliest(context, own.index, shared)
            survival *= chance
            if survival < least:
                break
            tokens.append(token)
            score += survival
            context = [*context[1 - LONGEST :], token]
        return SuffixDraft(tokens, score)

    def _likeliest(
        self, context: Sequence[int], own: SuffixIndex, shared: bool
    ) -> tuple[int, float]:
        """Token and chance; 0 where nothing is found."""
        keys = keys_of(context, ORDERS[-1])
        best = likeliest(own, context, keys, OWN_CAUTION)
        # What another answer drew under the same seed may have no part in this one's drafts.
        if shared:
            if best[1] < most_likely(context, CAUTION):
                best = max(best, likeliest(self.shared, context, keys, CAUTION), key=_chance)
            if self.answers is not None:
                best = max(best, self.answers.best(keys), key=_chance)
        return best


def _chance(offer: tuple[int, float]) -> float:
    return offer[1]


def most_likely(context: Sequence[int], caution: float) -> float:
    """The chance of an offer that no other one exceeds."""
    return SEEN / (SEEN + caution / len(context))


def likeliest(
    index: SuffixIndex, context: Sequence[int], keys: Sequence[int], caution: float
) -> tuple[int, float]:
    """The offer of the best chance among those of the orders of an index; `keys` of the context."""
    best, most = (SEPARATOR, 0.0), most_likely(context, caution)
    for found in index.newest(context, keys, SEEN):
        length, token = max(found, key=_length)
        agreeing = sum(other == token for _, other in found)
        best = max(best, (token, agreeing / (len(found) + caution / length)), key=_chance)
        if best[1] >= most:
            break
    return best


def _length(place: tuple[int, int]) -> int:
    return place[0]


class OwnText:
    """The index of one request's text so far."""

    def __init__(self) -> None:
        self.index = SuffixIndex(0)
        self.num_read = 0

    def read(self, history: list[int]) -> None:
        """Read the new part of a text."""
        if self.num_read == 0 or self.index.capacity < min(len(history), WINDOW):
            self.index = SuffixIndex(min(2 * len(history), WINDOW))
            self.index.begin_text()
            self.num_read = 0
        self.index.extend(history[self.num_read :])
        self.num_read = len(history)


# Lengths of context with a table of their own. Longer contexts are found among the occurrences of
# the next shorter order.
ORDERS = (1, 2, 4, 8)
# Positions of a chain that are looked at, newest first: hashes of other tokens are among them.
MAX_STEPS = 128
# Below this, Python's own numbers are faster than arrays.
FEW = 24
MIX = 0xD6E8FEB86659FD93
_Links = tuple[memoryview, memoryview]  # the newest place of a hash, and the one before each


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
        self._links: list[_Links] = [
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

    def newest(
        self, context: Sequence[int], keys: Sequence[int], most: int
    ) -> Iterator[list[tuple[int, int]]]:
        """For each order, the longest first, its at most `most` newest places that end as `context`
        does, where there are some: how many tokens agree there, and the token that follows. `keys`:
        those of the context."""
        backwards = context[::-1]
        for size, links in reversed([*zip(ORDERS, self._links)]):
            if size <= len(keys) and (found := self._ends(backwards, size, links, keys, most)):
                yield found

    def _ends(
        self, backwards: Sequence[int], size: int, links: _Links, keys: Sequence[int], most: int
    ) -> list[tuple[int, int]]:
        # One loop, for every drafted token goes through it several times.
        (heads, previous), cells, mask, oldest = links, self._cells, self._mask, self.oldest
        found: list[tuple[int, int]] = []
        place, last = heads[self._slot(keys[size - 1])] - 1, self.end - 1
        for _ in range(MAX_STEPS):
            if place < oldest or len(found) == most:
                break
            token = SEPARATOR if place == last else cells[place + 1 & mask]
            if token != SEPARATOR:
                length = 0
                for wanted in backwards[: place - oldest + 1]:
                    if cells[place - length & mask] != wanted:
                        break
                    length += 1
                if length >= size:  # not merely the same hash
                    found.append((length, token))
            place = previous[place & mask] - 1
        return found

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
        keys = keys_of(recent, ORDERS[-1])
        for size, (heads, previous) in zip(ORDERS, self._links):
            if size > len(keys):
                break
            slot = self._slot(keys[size - 1])
            previous[place & self._mask] = heads[slot]
            heads[slot] = place + 1

    def _append_many(self, tokens: np.ndarray) -> None:
        first = self.end
        self._text[np.arange(first, first + len(tokens)) & self._mask] = tokens
        self.end = first + len(tokens)
        begin = max(self._starts[-1], first - ORDERS[-1] + 1)
        recent = self._text[np.arange(begin, self.end) & self._mask].astype(np.uint64)
        key = np.zeros(len(recent), dtype=np.uint64)
        for back, power in enumerate(powers(ORDERS[-1])):
            key[back:] += (recent[: len(recent) - back] + np.uint64(1)) * power
            if back + 1 in ORDERS:
                places = np.arange(max(first, begin + back), self.end)
                slots = (key[places - begin] * np.uint64(MIX)) >> np.uint64(self._shift)
                self._link(ORDERS.index(back + 1), places, slots.astype(np.int64))

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
