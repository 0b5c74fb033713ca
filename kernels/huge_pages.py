"""Memory in huge pages for weights that are read once a pass, in order. In pages of 4 KiB a
processor's reading ahead ends with each page and waits for the address of the next one: 1.1 to 1.2
times the time (`scripts/bench_step`, products in small pages).
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

PAGE_BYTES = 2 << 20


def empty_in_huge_pages(count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count], not initialised, in huge pages where it has room for one and the system gives
    them; ordinary memory otherwise."""
    num_bytes = count * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it
    if num_bytes < PAGE_BYTES or advice is None:
        return torch.empty(count, dtype=dtype)
    # Mapped anew: what the C library has at hand lies in small pages already.
    room = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(room, dtype=torch.uint8)
    begin = -flat.data_ptr() % PAGE_BYTES
    with suppress(OSError):  # a kernel that was built without them
        # Whole pages alone, as the last one would be filled up beyond the end.
        room.madvise(advice, begin, num_bytes // PAGE_BYTES * PAGE_BYTES)
    return flat[begin : begin + num_bytes].view(dtype)
