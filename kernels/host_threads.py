"""Threads that OpenMP keeps for every thread of this process that has computed.

GNU's library lets an idle thread wait awake only while there are no more threads than processors.
Those of the thread that loaded the weights count, though it computes no more: beside them each of
the hundreds of products of a pass puts its threads to sleep and wakes them by system calls, 1.2
times a pass's time and 1.5 times that of a round which drafts.
"""

from __future__ import annotations

import ctypes

_KEEP_SETTINGS = 1  # OpenMP's `omp_pause_soft`


def release_threads() -> bool:
    """End the threads that OpenMP keeps for the calling thread, which gets new ones when it
    computes again. Returns False where OpenMP's library cannot do that."""
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):
        return False
    return pause(_KEEP_SETTINGS) == 0
