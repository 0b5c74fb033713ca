"""Owners of the blocks of the paged pool. Torch-free; the target's and the draft's pool share the
ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

_PROBES = 64
_GOLDEN = 0.6180339887498949


class BlockManager:
    """Reference-counted blocks `1 .. num_blocks - 1`.

    A request grows into neighbouring blocks while it can, and requests start far apart: attention
    reads a contiguous run as a slice instead of gathering it. A block whose contents are worth
    keeping (`keep`) stays findable without an owner until its room is needed; `on_evict` is then
    called with its key.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = set(range(1, num_blocks))
        self._references: dict[int, int] = {}
        self.kept: dict[int, bytes] = {}  # keys of kept blocks
        # kept blocks without owners, least recently used first
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._start = 0.0
        self.on_evict: Callable[[bytes], None] | None = None

    @property
    def num_free(self) -> int:
        """Blocks without owners, kept ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks in use."""
        return 1.0 - self.num_free / self.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def grow(self, blocks: list[int], num_tokens: int) -> bool:
        """Extends `blocks` in place until it covers `num_tokens` positions; all or nothing."""
        missing = self.blocks_for(num_tokens) - len(blocks)
        if missing > self.num_free:
            return False
        if missing > len(self._free):
            self._evict(missing - len(self._free))
        for _ in range(missing):
            block = self._next(blocks[-1] if blocks else None)
            self._free.remove(block)
            self._references[block] = 1
            blocks.append(block)
        return True

    def share(self, blocks: list[int]) -> list[int]:
        """Give the same blocks, owned or kept, to one more owner."""
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                self._references[block] = 0
            self._references[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Gives up one owner's hold and empties its list; a block without owners is free again."""
        # From the end, so that of one text the beginning, which others are likelier to share, is
        # evicted last.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            del self._references[block]
            if block in self.kept:
                self._idle[block] = None
            else:
                self._free.add(block)
        blocks.clear()

    def keep(self, block: int, key: bytes) -> None:
        """Let the contents of an owned block outlive its owners."""
        self.kept[block] = key

    def unkeep(self, block: int) -> None:
        del self.kept[block]
        if block in self._idle:
            del self._idle[block]
            self._free.add(block)

    def references(self, block: int) -> int:
        return self._references.get(block, 0)

    def _evict(self, num_blocks: int) -> None:
        # More than is needed at once, so that the next blocks of a growing request can be
        # neighbours.
        for _ in range(min(max(num_blocks, self.num_usable // 16), len(self._idle))):
            block, _ = self._idle.popitem(last=False)
            self._free.add(block)
            key = self.kept.pop(block)
            if self.on_evict is not None:
                self.on_evict(key)

    def _next(self, last: int | None) -> int:
        if last is not None and last + 1 in self._free:
            return last + 1
        self._start = (self._start + _GOLDEN) % 1.0
        start = 1 + int(self._start * self.num_usable)
        for block in range(start, min(start + _PROBES, self.num_blocks)):
            if block in self._free:
                return block
        return next(iter(self._free))
