"""Source of the likeliest tokens alone, of a target on a server."""

from __future__ import annotations

import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.remote.target import RemoteTarget
from draftsmith.kernels.sampling.top_tokens import TopProbs
from draftsmith.train.objective.teacher import TargetSignals


class LikeliestSource:
    """The `top` likeliest tokens and their tail mass at every position, in one pass over the
    text."""

    def __init__(self, target: RemoteTarget, top: int):
        self.target, self.top = target, top

    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        mask = text.attention_mask
        found = self.target.likeliest(text.input_ids, mask, text.segments, self.top)
        number = (mask.flatten().cumsum(dim=0) - 1).view_as(mask)

        def distributions(row: torch.Tensor, position: torch.Tensor) -> TopProbs:
            chosen = number[row, position - 1]
            return TopProbs(*(values[chosen] for values in found))

        return TargetSignals(None, distributions)
