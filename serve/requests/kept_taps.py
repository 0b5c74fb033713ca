"""States of the target that a request keeps for a draft which has yet to read them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftsmith.serve.requests.request import Request

if TYPE_CHECKING:
    import torch


MOST_LATE = 16  # passes whose taps are still in parts


class SharedTaps:
    """Taps of passes that follow each other with the same rows, which read a token each. A pass is
    kept once for all rows, as it came, and taken apart where a draft reads it."""

    def __init__(self, requests: Sequence[Request]):
        # Not the drafts themselves, which hold what reads this.
        self._drafts = [weakref.ref(request.draft) for request in requests]
        self._num_passes = 0
        self._joined: list[torch.Tensor] = []  # [passes, B, width] each
        # parts of later passes, [1, B, n] each
        self._late: list[Sequence[torch.Tensor]] = []
        for index, request in enumerate(requests):
            if reads_taps(request):
                request.draft.taps.append(RowTaps(self, index))

    def are_of(self, requests: Sequence[Request]) -> bool:
        """True when these are the rows, none of which has started again."""
        # Drafts are equal where they are the same.
        return [request.draft for request in requests] == [draft() for draft in self._drafts]

    def __len__(self) -> int:
        return self._num_passes

    def add(self, parts: Sequence[torch.Tensor]) -> None:
        """Keep a pass, whose taps are `parts` [1, B, n] side by side."""
        if self._late and len(parts) != len(self._late[0]):
            self.passes()
        self._late.append(parts)
        self._num_passes += 1
        if len(self._late) == MOST_LATE:
            self.passes()

    def passes(self) -> list[torch.Tensor]:
        """All passes in their order, [passes, B, width] each."""
        if self._late:
            import torch

            self._joined.append(torch.cat([torch.cat(part) for part in zip(*self._late)], dim=-1))
            self._late = []
        return self._joined


class RowTaps:
    """Taps of one row of shared passes, in their order."""

    def __init__(self, shared: SharedTaps, row: int):
        self._shared, self._row = shared, row

    def __len__(self) -> int:
        return len(self._shared)

    def __getitem__(self, wanted: slice) -> torch.Tensor:
        """[n, width]"""
        import torch

        begin, end, _ = wanted.indices(len(self))
        pieces, position = [], 0
        for passes in self._shared.passes():
            count = passes.shape[0]
            if position < end and begin < position + count:
                pieces.append(passes[max(begin - position, 0) : end - position, self._row])
            position += count
        # A copy: a view would keep the taps of the other rows alive.
        return torch.cat(pieces) if pieces else passes[:0, self._row]


def reads_taps(request: Request) -> bool:
    """True when the taps of the request's tokens are of use to its draft."""
    return request.k > 0 and not request.draft.lost_taps


def wants_taps(request: Request) -> bool:
    """True when the taps of the request's tokens are of use to its draft or to its records."""
    log = request.recording.tap_log
    return reads_taps(request) or (request.k > 0 and log is not None and not log.is_full)


def keep_taps(request: Request, taps: torch.Tensor, begin: int, count: int) -> None:
    """Keep the request's share `taps[begin : begin + count]` of a pass, until its drafter has
    consumed it."""
    if count > 0 and reads_taps(request):
        request.draft.taps.append(taps[begin : begin + count])


def drop_taps(request: Request, cached: int) -> None:
    """Drop the taps of positions below `cached`, which the draft's cache holds."""
    surplus = cached - request.draft.cached
    request.draft.cached = cached
    while request.draft.taps and surplus > 0:
        first = request.draft.taps[0]
        count = len(first)
        if count > surplus:
            request.draft.taps[0] = first[surplus:]
            return
        surplus -= count
        request.draft.taps.pop(0)
