"""State of a chain's rows at fixed addresses, which graphs hand from step to step.

R rows that draft, H hidden width.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from draftsmith.kernels.constants import NULL_BLOCK
from draftsmith.kernels.sampling.filters import Passes, SamplingRows

if TYPE_CHECKING:
    from draftsmith.drafters.autoregressive.state import ChainState


EVERY_TOKEN = 1 << 30  # more than any vocabulary has


class ChainBuffers:
    """State of as many rows as a batch may have, at fixed addresses. A bucket uses the first of
    them."""

    def __init__(
        self, num_rows: int, max_blocks: int, hidden: torch.Tensor, sampling: SamplingRows
    ):
        device = hidden.device
        whole = {"dtype": torch.int64, "device": device}
        self.tokens, self.positions, self.left, self.seeds = torch.zeros(4, num_rows, **whole)
        self.tables = torch.full((num_rows, max_blocks), NULL_BLOCK, **whole)
        self.hidden = torch.zeros(num_rows, hidden.shape[1], dtype=hidden.dtype, device=device)
        self.sampling = sampling.room(num_rows)

    def fill(
        self, state: ChainState, left: torch.Tensor, seeds: torch.Tensor, sampling: SamplingRows
    ) -> None:
        """`left` [R]: how many tokens each row may still draft; further rows draft none."""
        self.left.zero_()
        self.tables[: len(left), state.tables.shape[1] :] = NULL_BLOCK
        self.write(state, left, seeds, sampling)

    def write(
        self, state: ChainState, left: torch.Tensor, seeds: torch.Tensor, sampling: SamplingRows
    ) -> None:
        """The first R rows."""
        count, width = state.tables.shape
        pairs = [
            (self.tables[:, :width], state.tables),
            (self.tokens, state.tokens),
            (self.hidden, state.hidden),
            (self.positions, state.positions),
            (self.left, left),
            (self.seeds, seeds),
        ]
        for buffer, values in pairs:
            buffer[:count].copy_(values)
        self.sampling.take(sampling)


def bucket(sizes: Sequence[int], size: int) -> int:
    """The smallest of the ascending `sizes` that `size` fits into."""
    return sizes[bisect.bisect_left(sizes, size)]


def for_graphs(passes: Passes) -> Passes:
    """Three kinds, each of which can serve what needs less: Triton's draws filter by all or by
    nothing."""
    if passes.all_greedy:
        return passes
    filters = passes.filtered
    return Passes(True, False, True, EVERY_TOKEN if filters else 0, filters, filters)
