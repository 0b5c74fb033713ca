"""Requests that begin with a cached prefix whose keys and values an older draft wrote.

Cached blocks outlive a swap. The text is the target's either way; the new draft accepts less behind
them until the cache has turned over, or is reset.
"""

from __future__ import annotations

from typing import Any


class CachedPrefixes:
    """Counts of one worker.

    Attributes:
        requests: all new ones; `cached_requests` began with cached tokens, `old_requests` with
            blocks from before the last change of the draft
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.written: dict[int, int] = {}  # by block: changes of the draft before it was written
        self.requests = self.cached_requests = self.old_requests = self.old_tokens = 0

    def status(self) -> dict[str, int]:
        return {
            "requests": self.requests,
            "cached_requests": self.cached_requests,
            "old_requests": self.old_requests,
            "old_tokens": self.old_tokens,
        }

    def see(self, scheduled: Any, changes: int) -> None:
        """Count one step's new requests, from vLLM's scheduler output.

        Args:
            changes: how often the draft changed until now
        """
        for new in scheduled.scheduled_new_reqs:
            blocks = list(new.block_ids[0]) if new.block_ids else []
            cached = new.num_computed_tokens // self.block_size
            old = sum(self.written.get(block, 0) < changes for block in blocks[:cached])
            self.requests += 1
            self.cached_requests += cached > 0
            self.old_requests += old > 0
            self.old_tokens += old * self.block_size
            self.written.update(dict.fromkeys(blocks[cached:], changes))
        for groups in getattr(scheduled.scheduled_cached_reqs, "new_block_ids", None) or ():
            if groups:
                self.written.update(dict.fromkeys(groups[0], changes))
