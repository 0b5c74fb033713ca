"""The unroll's attention in one fused pass over the keys of all steps, by torch's flex attention:
no scores are stored.

Compiled on CUDA. On a CPU torch computes it unfused and without a backward pass, which serves to
compare results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from draftsmith.drafters.autoregressive.unroll import UnrollPass, is_hidden


class FlexUnrollPass(UnrollPass):
    def __init__(self, segments: torch.Tensor | None = None, *, first: int = 0) -> None:
        super().__init__(segments, first=first)
        self._masks: dict[int, BlockMask] = {}  # of the newest step, for its layers

    def weigh(
        self, query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if self.step not in self._masks:
            self._masks = {self.step: self._mask(query, keys[0].shape[2])}
        attend = compiled() if query.is_cuda else flex_attention
        mask = self._masks[self.step]
        # The queries are scaled already.
        return attend(
            query,
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
            block_mask=mask,
            scale=1.0,
            enable_gqa=True,
        )

    def _mask(self, query: torch.Tensor, length: int) -> BlockMask:
        """`length` columns at step 0."""
        begins, step, first, later = self.sights.begins, self.step, self.first, length - self.first
        begin = first if step else 0

        def sees(
            row: torch.Tensor, head: torch.Tensor, at: torch.Tensor, key_at: torch.Tensor
        ) -> torch.Tensor:
            column, behind = begin + at, key_at - length
            made_at = torch.where(behind < 0, 0, 1 + behind // later)
            key_column = torch.where(behind < 0, key_at, first + behind % later)
            true = ~is_hidden(
                column, key_column, step, None if begins is None else begins[row, column]
            )
            return torch.where(made_at == 0, true, key_column == column - (step - made_at))

        rows = None if begins is None else len(query)
        return create_block_mask(
            sees, rows, None, query.shape[2], length + step * later, device=query.device
        )


@cache
def compiled() -> Callable[..., torch.Tensor]:
    """For any length: batches differ."""
    return torch.compile(flex_attention, dynamic=True)
