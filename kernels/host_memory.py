"""Memory of this machine, and reuse of freed memory. The C library gives large freed blocks back to
the system, which then zeroes every page again at its next use: 0.16 to 0.42 of the time of 64
requests at once."""

from __future__ import annotations

import ctypes
import os

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
