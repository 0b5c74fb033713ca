"""Memory of this machine, reuse of freed memory, and memory in huge pages.

The C library gives large freed blocks back to the system, which then zeroes every page again at its
next use: 0.16 to 0.42 of the time of 64 requests at once. Weights are read once a pass, in order:
in pages of 4 KiB a processor's reading ahead ends with each page and waits for the address of the
next one, 1.1 to 1.2 times the time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

# Numbers of glibc's `mallopt`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# What glibc allows at most; larger blocks are mapped from the system and given back as before.
_LARGEST_BLOCK_BYTES = 32 << 20
_KEPT_BYTES = 256 << 20
# Weights are copied only as often as this share of the machine's memory holds them.
SHARE_OF_MEMORY = 0.125


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def affordable_copies(num_bytes: int) -> int:
    """Copies that may be made of weights of so many bytes."""
    return int(SHARE_OF_MEMORY * host_bytes() / max(1, num_bytes))


def keep_freed_memory() -> bool:
    """Let this process keep up to `_KEPT_BYTES` of freed memory for its next allocations.

    Returns False where nothing is changed: another C library than glibc, or settings of the
    environment (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`). Safe to call
    again.
    """
    if _is_set_by_user():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    kept = mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES), mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    return kept == (1, 1)


def _is_set_by_user() -> bool:
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(name in os.environ for name in names) or "glibc.malloc." in tunables


PAGE_BYTES = 2 << 20
# Less lies in a room that is shared, one behind the other in the order of asking: alone it would
# have no whole page, or much of it behind the last one.
ALONE_BYTES, ROOM_BYTES = 2 * PAGE_BYTES, 8 * PAGE_BYTES
_LINE_BYTES = 64


def empty_in_huge_pages(count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count], not initialised, in huge pages where the system gives them; ordinary memory
    otherwise."""
    num_bytes = count * dtype.itemsize
    if count == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux alone has it
        return torch.empty(count, dtype=dtype)
    if num_bytes < ALONE_BYTES:
        return _shared.empty(num_bytes).view(dtype)
    # Whole pages alone, as the last one would be filled up beyond the end.
    room, begin = _mapped(num_bytes, num_bytes // PAGE_BYTES)
    return _bytes_of(room, begin, num_bytes).view(dtype)


class _Shared:
    """Memory of rooms, each of which is given back with the last tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room: Callable[[], mmap.mmap | None] = lambda: None
        self._begin, self._end = 0, 0  # of what is left of the room

    def empty(self, num_bytes: int) -> torch.Tensor:
        with self._lock:
            room = self._room()
            if room is None or self._begin + num_bytes > self._end:
                room, self._begin = _mapped(ROOM_BYTES, ROOM_BYTES // PAGE_BYTES)
                self._room, self._end = weakref.ref(room), self._begin + ROOM_BYTES
            found = _bytes_of(room, self._begin, num_bytes)
            self._begin += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
            return found


_shared = _Shared()


def _mapped(num_bytes: int, num_pages: int) -> tuple[mmap.mmap, int]:
    """Memory, and where `num_bytes` begin in it, the first pages of which are huge."""
    # Mapped anew: what the C library has at hand lies in small pages already.
    room = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % PAGE_BYTES
    with suppress(OSError):  # a kernel that was built without them
        room.madvise(mmap.MADV_HUGEPAGE, begin, num_pages * PAGE_BYTES)
    return room, begin


def _bytes_of(room: mmap.mmap, begin: int, count: int) -> torch.Tensor:
    return torch.frombuffer(room, dtype=torch.uint8, offset=begin, count=count)
