"""Source of the likeliest tokens alone, of a target on a server."""

from __future__ import annotations

from typing import Protocol

import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.kernels.sampling.top_tokens import TopProbs
from draftsmith.train.objective.teacher import TargetSignals


class GivesLikeliest(Protocol):
    def likeliest(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        segments: torch.Tensor | None,
        top: int,
    ) -> TopProbs:
        """The `top` likeliest tokens after each of the N tokens that are no padding, row by row."""
        ...


class LikeliestSource:
    """The `top` likeliest tokens and their tail mass at every position, in one pass over the
    text."""

    def __init__(self, target: GivesLikeliest, top: int):
        self.target, self.top = target, top

    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        mask = text.attention_mask
        found = self.target.likeliest(text.input_ids, mask, text.segments, self.top)
        number = (mask.flatten().cumsum(dim=0) - 1).view_as(mask)

        def distributions(row: torch.Tensor, position: torch.Tensor) -> TopProbs:
            chosen = number[row, position - 1]
            return TopProbs(*(values[chosen] for values in found))

        return TargetSignals(None, distributions)
