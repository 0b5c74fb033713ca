"""Hidden states of the target at a request's first positions, kept for its records. Torch-free."""

from __future__ import annotations

import numpy as np


class TapLog:
    """States of positions 0 .. `end` - 1, in the order in which passes read them, at most `most`
    positions. Once a position was read without being kept, what follows is of no use to a draft,
    which reads all states before."""

    def __init__(self, most: int):
        self.most = most
        self.end = 0
        self.recorded = 0  # positions 0 .. recorded - 1 are in records
        self.has_hole = False
        self._states: np.ndarray | None = None  # [most, width] uint16, filled up to `end`

    @property
    def is_full(self) -> bool:
        return self.has_hole or self.end == self.most

    def add(self, begin: int, states: np.ndarray) -> None:
        """Keeps `states` [n, width] of positions from `begin` on. Those that are known already,
        read again after a preemption, stay as they are."""
        self.has_hole = self.has_hole or begin > self.end
        fresh = states[max(0, self.end - begin) : self.most - begin]
        if self.has_hole or len(fresh) == 0:
            return
        if self._states is None:
            self._states = np.empty((self.most, states.shape[1]), dtype=np.uint16)
        self._states[self.end : self.end + len(fresh)] = fresh
        self.end += len(fresh)

    def between(self, begin: int, end: int) -> np.ndarray | None:
        """[end - begin, width], a copy; None unless all are there."""
        if self._states is None or not 0 <= begin < end <= self.end:
            return None
        return self._states[begin:end].copy()
