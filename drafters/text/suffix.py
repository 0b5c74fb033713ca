"""Suffix decoding (arXiv 2411.04975): drafts the most frequent continuation of what the text ends
with, as seen in this request and in those that have finished. No weights, no cache, one-hot q.

A context of L matching tokens earns a draft of at most L * max_spec_factor + max_spec_offset
tokens. The draft follows the most frequent next token while the estimated probability of having
come so far is at least min_token_prob; its score is the sum of those probabilities, the number of
tokens it expects to have accepted. The best score wins, and of equals the longer context.

The index: hash chains over a ring, as in LZ77 compressors. For each order o a table maps the hash
of o consecutive tokens to the newest position where they end, and every position points to the one
before it with the same hash. The oldest tokens are overwritten, so memory is bounded (about 70
bytes per token), a token costs a few operations, and nothing is ever searched in full. Hashes only
find candidates; what is believed is the tokens themselves.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftsmith.config import check_limits
from draftsmith.drafters.interface import DraftInputs
from draftsmith.drafters.options import SuffixOptions
from draftsmith.drafters.text.ngram import CopiesText

# The part of a request's own text that is searched: about 9 MB of index where a text is as long.
WINDOW = 131_072
# Scores that differ by no more are equal: they are sums of rounded products.
SAME_SCORE = 1e-12


class SuffixDraft(NamedTuple):
    tokens: list[int]
    score: float  # tokens expected to be accepted


class Suffix(CopiesText):
    """Suffix decoding. Text shared between requests is bounded by `max_cached_requests` and
    `max_cached_tokens`; the oldest goes first."""

    family = "suffix"

    def __init__(self, options: SuffixOptions | None = None):
        self.options = options or SuffixOptions()
        check_limits(self.options, "suffix_")
        self.shared = SuffixIndex(
            self.options.max_cached_tokens, max_texts=max(1, self.options.max_cached_requests)
        )
        self._own: dict[str, OwnText] = {}

    def copied(self, inputs: DraftInputs) -> list[list[int]]:
        return [draft.tokens for draft in self.drafts(inputs)]

    def drafts(self, inputs: DraftInputs) -> list[SuffixDraft]:
        names = inputs.request_ids or [""] * len(inputs.histories)
        shares = inputs.shares or [True] * len(inputs.histories)
        rows = zip(names, inputs.histories, inputs.num_draft.tolist(), shares, strict=True)
        return [self._draft(name, history, k, shared) for name, history, k, shared in rows]

    def finished(self, request_id: str, tokens: list[int]) -> None:
        self._own.pop(request_id, None)
        if tokens and self.options.max_cached_requests > 0:
            self.shared.begin_text()
            self.shared.extend(tokens)

    def _draft(self, name: str, history: list[int], k: int, shared: bool) -> SuffixDraft:
        if k == 0:
            return SuffixDraft([], 0.0)
        own = self._own.setdefault(name, OwnText()) if name else OwnText()
        own.read(history)
        context = history[-self.options.max_tree_depth :]
        draft = self._best(own.index, context, k)
        if shared and draft.score < k and self.shared.num_texts > 0:
            draft = better(draft, self._best(self.shared, context, k))
        return draft

    def _best(self, index: SuffixIndex, context: Sequence[int], k: int) -> SuffixDraft:
        best = SuffixDraft([], 0.0)
        longest = len(context)
        for order in reversed(range(len(ORDERS))):
            # No draft from contexts up to `longest` can beat what was found.
            if best.score >= self._budget(longest, k):
                break
            found = index.occurrences(context, order, k)
            for length in sorted({*found.lengths[found.lengths <= longest].tolist()}, reverse=True):
                budget = self._budget(length, k)
                if best.score >= budget:
                    break
                followed = found.continuations[found.lengths >= length]
                draft = most_frequent(followed, budget, self.options.min_token_prob)
                best = better(best, draft)
            longest = min(longest, ORDERS[order] - 1)
        return best

    def _budget(self, length: int, k: int) -> int:
        return max(
            0, min(k, int(length * self.options.max_spec_factor + self.options.max_spec_offset))
        )


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


def better(first: SuffixDraft, second: SuffixDraft) -> SuffixDraft:
    """The draft of the higher score, of equal scores the first."""
    return second if second.score > first.score + SAME_SCORE else first


def most_frequent(continuations: np.ndarray, budget: int, min_prob: float) -> SuffixDraft:
    """Follows the most frequent next token (of equals, the one seen last) of continuations [C, K],
    newest first."""
    rows: list[list[int]] = continuations[:, :budget].tolist()
    tokens: list[int] = []
    score, prob = 0.0, 1.0
    for depth in range(budget):
        counts = Counter(row[depth] for row in rows)
        ended = counts.pop(SEPARATOR, 0)
        if not counts:
            break
        # Counter keeps the order of the first sight, and max the first of equals.
        token, count = max(counts.items(), key=lambda item: item[1])
        prob *= count / (counts.total() + ended)
        if prob < min_prob:
            break
        tokens.append(token)
        score += prob
        rows = [row for row in rows if row[depth] == token]
    return SuffixDraft(tokens, score)


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
