"""Cached prefixes by the draft that wrote them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from draftsmith.fleet.swaps.swap import CachedPrefixes


def step(new: list[tuple[list[int], int]], more: Any = ()) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(block_ids=(blocks,), num_computed_tokens=cached)
            for blocks, cached in new
        ],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=more),
    )


def test_prefixes_of_an_older_draft_are_counted_apart() -> None:
    prefixes = CachedPrefixes(16)
    prefixes.see(step([([1, 2, 3], 0)], [None, ([4],)]), 0)
    prefixes.see(step([([1, 2, 5], 32)]), 0)
    assert (prefixes.cached_requests, prefixes.old_requests) == (1, 0)
    # The draft changed; blocks 1, 2 and 4 were written before, 6 afterwards.
    prefixes.see(step([([1, 2, 6], 32), ([4, 7], 16)]), 1)
    assert (prefixes.old_requests, prefixes.old_tokens) == (2, 48)
    prefixes.see(step([([6, 8], 16), ([9], 0)]), 1)
    assert prefixes.status() == {
        "requests": 6, "cached_requests": 4, "old_requests": 2, "old_tokens": 48,
    }  # fmt: skip
    # Freed blocks are written again by another request.
    prefixes.see(step([([1], 0)]), 1)
    prefixes.see(step([([1, 3], 16)]), 1)
    assert prefixes.old_requests == 2
