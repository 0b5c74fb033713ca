"""Prefix caching: full blocks of committed text are found again by what they hold. Torch-free but
for the taps it carries.

A request whose records hold hidden states goes on from blocks whose states were kept for records,
and reads the rest again, so that its records have no hole.

A block's key is a digest of all text up to its end, chained from block to block, and of the `ahead`
tokens after it. A drafter that reads the token at t + 1 beside the state at t (`ahead` 1) keeps in
a block's last position what depends on the token after the block; with that token in the key,
target and draft share a block exactly when both find in it what they would have written. The root
of the chain is the target's revision, the request's adapter and its salt. The draft's version is no
part of it: keys and values that an older version wrote stay, as those of running requests do, and
only acceptance can suffer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from draftsmith.serve.cache.blocks import BlockManager
from draftsmith.serve.requests.request import Request, TapLog

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class _Entry:
    block: int
    draft_ready: bool  # the draft has written its keys and values of the block as well
    # what the draft still has to read of it, in order; None: not kept
    taps: list[torch.Tensor] | None = None
    # for records: [block_size, width] uint16; None: not kept
    logged: np.ndarray | None = None


class PrefixCache:
    """Blocks stay after their request until the block manager needs them, the least recently used
    first.

    Args:
        root: what the cached values depend on besides the text.
        ahead: how many tokens after a position the draft's values there depend on.
        needs_taps: the drafter cannot read a text again from its tokens alone.
        max_tapped: blocks that may carry taps at the same time; the least recently used lose them
        first. As many carry states for records.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        root: str,
        ahead: int = 0,
        needs_taps: bool = False,
        max_tapped: int | None = None,
    ):
        self.blocks, self.ahead, self.needs_taps, self.max_tapped = (
            blocks,
            ahead,
            needs_taps,
            max_tapped,
        )
        self._root = blake2b(
            f"{root} {blocks.block_size} {ahead}".encode(), digest_size=16
        ).digest()
        self._entries: dict[bytes, _Entry] = {}
        self._tapped: dict[bytes, None] = {}  # keys of those with taps, the latest used last
        self._logged: dict[bytes, None] = {}  # of those with states for records, in order
        blocks.on_evict = self._evicted

    def attach(self, request: Request) -> None:
        """Starts a request without blocks on those that hold the beginning of its text."""
        if request.wants_prompt_logprobs:
            return
        entries = list(self._usable(request))
        if not entries:
            return
        size = self.blocks.block_size
        request.blocks = self.blocks.share([entry.block for entry in entries])
        request.cache.computed = len(entries) * size
        _log(request, entries, size)
        if request.k > 0:
            request.draft.cached = _num_ready(entries) * size
            if self.needs_taps:
                unread = entries[_num_ready(entries) :]
                request.draft.taps = [tap for entry in unread for tap in entry.taps or ()]
                for entry in unread:
                    key = self.blocks.kept[entry.block]
                    self._tapped[key] = self._tapped.pop(key)

    def num_found(self, request: Request) -> int:
        """Number of the request's tokens that `attach` would find."""
        return (
            0
            if request.wants_prompt_logprobs
            else sum(1 for _ in self._usable(request)) * self.blocks.block_size
        )

    def store(self, request: Request) -> None:
        """After a round: the request's full blocks may be found by others from now on."""
        size, cache = self.blocks.block_size, request.cache
        num_full = min(cache.computed, len(request.tokens) - self.ahead) // size
        num_ready = min(num_full, request.draft.cached // size)
        if num_full <= cache.num_stored and num_ready <= cache.num_ready:
            return
        # Those that were stored before the draft had read them are stored again when it has.
        again = range(cache.num_ready, min(num_ready, cache.num_stored))
        for index in (*again, *range(cache.num_stored, num_full)):
            self._store(request, index, index < num_ready)
        cache.num_stored = max(cache.num_stored, num_full)
        cache.num_ready = max(cache.num_ready, num_ready)

    def _store(self, request: Request, index: int, ready: bool) -> None:
        key, block = self._key(request, index), request.blocks[index]
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(block, False)
            self.blocks.keep(block, key)
        taps = None if ready else self._wanted_taps(request, index, entry)
        if entry.block != block and not entry.draft_ready and (ready or taps is not None):
            # The same text in two blocks: the one that both models can use is the one to find.
            self.blocks.unkeep(entry.block)
            entry.block = block
            self.blocks.keep(block, key)
        if request.recording.tap_log is not None and entry.logged is None:
            self._keep_logged(entry, key, request.recording.tap_log, index)
        if entry.block != block or entry.draft_ready:
            return
        entry.draft_ready = ready
        if ready or not self.needs_taps:
            entry.taps = None
            self._tapped.pop(key, None)
        elif taps is not None:
            entry.taps = taps
            self._tapped[key] = None
            self._bound(self._tapped, "taps")

    def _keep_logged(self, entry: _Entry, key: bytes, log: TapLog, index: int) -> None:
        size = self.blocks.block_size
        entry.logged = log.between(index * size, (index + 1) * size)
        if entry.logged is not None:
            self._logged[key] = None
            self._bound(self._logged, "logged")

    def _usable(self, request: Request) -> Iterator[_Entry]:
        """Cached blocks from the text's beginning that this request can go on from, drafts
        included."""
        # Something is always left to compute: a distribution to decide from, a state to draft from,
        # and the newest token of a request that comes back, which belongs to its next round.
        kept_back = max(self.ahead, 1 if request.num_output > 0 else 0)
        all_ready = True
        for index in range((request.num_tokens - 1 - kept_back) // self.blocks.block_size):
            entry = self._entries.get(self._key(request, index))
            if entry is None:
                return
            all_ready = all_ready and entry.draft_ready
            if self.needs_taps and request.k > 0 and not all_ready and entry.taps is None:
                return
            if entry.logged is None and _lacks(request, (index + 1) * self.blocks.block_size):
                return
            yield entry

    def _key(self, request: Request, index: int) -> bytes:
        size = self.blocks.block_size
        while len(request.block_keys) <= index:
            begin = len(request.block_keys) * size
            before = request.block_keys[-1] if request.block_keys else self._root_of(request)
            text = array("q", request.tokens[begin : begin + size + self.ahead]).tobytes()
            request.block_keys.append(blake2b(before + text, digest_size=16).digest())
        return request.block_keys[index]

    def _root_of(self, request: Request) -> bytes:
        parts = request.options.adapter, request.options.cache_salt
        return self._root + "\0".join(parts).encode()

    def _wanted_taps(
        self, request: Request, index: int, entry: _Entry
    ) -> list[torch.Tensor] | None:
        """Taps that the entry lacks and the request has."""
        is_wanted = self.needs_taps and not entry.draft_ready and entry.taps is None
        return self._taps(request, index) if is_wanted and request.k > 0 else None

    def _taps(self, request: Request, index: int) -> list[torch.Tensor] | None:
        """The block's share of what the request keeps for its draft; None when a part of it is
        gone."""
        size = self.blocks.block_size
        begin, end = index * size, (index + 1) * size
        if request.draft.cached > begin:
            return None
        found, position = [], request.draft.cached
        for tap in request.draft.taps:
            piece = tap[max(begin - position, 0) : max(end - position, 0)]
            # A copy: a view would keep the taps of the whole round alive.
            found += [piece.clone()] if len(piece) else []
            position += len(tap)
        return found if position >= end else None

    def _bound(self, held: dict[bytes, None], what: str) -> None:
        """Drop `what` entries hold beyond as many as may, from the first on."""
        while self.max_tapped is not None and len(held) > self.max_tapped:
            first = next(iter(held))
            del held[first]
            setattr(self._entries[first], what, None)

    def _evicted(self, key: bytes) -> None:
        del self._entries[key]
        self._tapped.pop(key, None)
        self._logged.pop(key, None)


def _lacks(request: Request, end: int) -> bool:
    """True where records of the request are to hold states of positions below `end` that it does
    not have."""
    log = request.recording.tap_log
    return log is not None and request.k > 0 and not log.is_full and log.end < min(end, log.most)


def _log(request: Request, entries: Sequence[_Entry], size: int) -> None:
    for index, entry in enumerate(entries):
        if request.recording.tap_log is not None and entry.logged is not None:
            request.recording.tap_log.add(index * size, entry.logged)


def _num_ready(entries: list[_Entry]) -> int:
    return next(
        (index for index, entry in enumerate(entries) if not entry.draft_ready), len(entries)
    )
