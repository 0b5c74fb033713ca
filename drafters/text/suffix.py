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
from draftsmith.drafters.text.answers import CAUTION, SEPARATOR, WORD, AnswerTable, keys_of
from draftsmith.drafters.weights import ReadBytes
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.suffix_search import IndexFields, drafted, extended, searches

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
        compiled: searches by a kernel, where there is a compiler.
    """

    family = "suffix"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        max_cached_requests: int = 10_000,
        max_cached_tokens: int = 1 << 21,
        answers: AnswerTable | None = None,
        compiled: bool = True,
    ):
        self.keeps_finished, self.answers = max_cached_requests > 0, answers
        texts = max(1, max_cached_requests)
        self.shared = SuffixIndex(max_cached_tokens, max_texts=texts, compiled=compiled)
        self._compiled, self._search = compiled, searches() if compiled else None
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
        own = self._own.get(name) or OwnText(compiled=self._compiled)
        if name:
            self._own[name] = own
        own.read(history)
        context = history[-LONGEST:]
        if self._search is not None:
            others = self.shared.fields if shared else None
            table = self.answers.fields if shared and self.answers is not None else None
            texts, cautions = (own.index.fields, others, table), (OWN_CAUTION, CAUTION)
            return SuffixDraft(*drafted(self._search, *texts, context, k, cautions, least))
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
        best = likeliest(own, context, OWN_CAUTION)
        # What another answer drew under the same seed may have no part in this one's drafts.
        if shared:
            best = max(best, likeliest(self.shared, context, CAUTION), key=_chance)
            if self.answers is not None:
                best = max(best, self.answers.best(context), key=_chance)
        return best


def _chance(offer: tuple[int, float]) -> float:
    return offer[1]


def likeliest(index: SuffixIndex, context: Sequence[int], caution: float) -> tuple[int, float]:
    """The offer of the best chance among those of the orders of an index."""
    best = SEPARATOR, 0.0
    for found in index.newest(context, SEEN):
        length, token = max(found, key=lambda place: place[0])
        agreeing = sum(other == token for _, other in found)
        best = max(best, (token, agreeing / (len(found) + caution / length)), key=_chance)
    return best


class OwnText:
    """The index of one request's text so far."""

    def __init__(self, *, compiled: bool) -> None:
        self.compiled = compiled
        self.index = SuffixIndex(0, compiled=compiled)
        self.num_read = 0

    def read(self, history: list[int]) -> None:
        """Read the new part of a text."""
        if self.num_read == 0 or self.index.capacity < min(len(history), WINDOW):
            self.index = SuffixIndex(min(2 * len(history), WINDOW), compiled=self.compiled)
            self.index.begin_text()
            self.num_read = 0
        self.index.extend(history[self.num_read :])
        self.num_read = len(history)


# Lengths of context with a table of their own. Longer contexts are found among the occurrences of
# the next shorter order.
ORDERS = (1, 2, 4, 8)
# Positions of a chain that are looked at, newest first: hashes of other tokens are among them.
MAX_STEPS = 128
MIX = 0xD6E8FEB86659FD93


class SuffixIndex:
    """Texts are appended one after another; the newest may be extended. `capacity` tokens, rounded
    up to a power of two."""

    def __init__(self, capacity: int, *, max_texts: int = 1, compiled: bool = True):
        bits = max(6, (capacity - 1).bit_length())
        self.capacity, self.max_texts = 1 << bits, max_texts
        self._mask, self._shift = self.capacity - 1, 64 - bits
        self._text = np.zeros(self.capacity, dtype=np.int32)
        # Positions plus one, so that pages of zeros that were never touched mean "none".
        heads, previous = (
            [np.zeros(self.capacity, dtype=np.int64) for _ in ORDERS] for _ in range(2)
        )
        # Views that give Python's own numbers.
        self._cells = memoryview(self._text)
        self._links = [(memoryview(head), memoryview(link)) for head, link in zip(heads, previous)]
        self._extend = found[0] if compiled and (found := searches()) else None
        self._fields = IndexFields.of(self._text, heads, previous, self._mask, self._shift)
        self._starts: deque[int] = deque()  # of the texts still held
        self.end = 0  # positions are never reused; slots are

    @property
    def oldest(self) -> int:
        """The first position that may be looked at."""
        return max(self._starts[0] if self._starts else self.end, self.end - self.capacity)

    @property
    def fields(self) -> IndexFields:
        begin = self._starts[-1] if self._starts else self.end
        self._fields.oldest, self._fields.end, self._fields.begin = self.oldest, self.end, begin
        return self._fields

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
        if self._extend is not None:
            extended(self._extend, self.fields, tokens)
            self.end += len(tokens)
        else:
            for token in tokens:
                self._append(token)

    def newest(self, context: Sequence[int], most: int) -> Iterator[list[tuple[int, int]]]:
        """For each order, the longest first, its at most `most` newest places that end as `context`
        does, where there are some: how many tokens agree there, and the token that follows."""
        keys = keys_of(context, ORDERS[-1])
        for order, size in reversed([*enumerate(ORDERS)]):
            if size <= len(keys) and (found := self._ends(context, order, keys[size - 1], most)):
                yield found

    def _ends(
        self, context: Sequence[int], order: int, key: int, most: int
    ) -> list[tuple[int, int]]:
        heads, previous = self._links[order]
        cells, mask, oldest = self._cells, self._mask, self.oldest
        found: list[tuple[int, int]] = []
        place, last = heads[self._slot(key)] - 1, self.end - 1
        for _ in range(MAX_STEPS):
            if place < oldest or len(found) == most:
                break
            token = SEPARATOR if place == last else cells[place + 1 & mask]
            if token != SEPARATOR:
                length = 0
                for wanted in context[::-1][: place - oldest + 1]:
                    if cells[place - length & mask] != wanted:
                        break
                    length += 1
                if length >= ORDERS[order]:  # not merely the same hash
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
