"""The gradient of one step of online learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from draftsmith.distill.config import LearnConfig
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.train.data.roles import Row, padded_rows
from draftsmith.train.objective.depth_weights import step_weighting
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import StepSums, unrolled_loss


class Gradients(Protocol):
    def add(self, drafter: torch.nn.Module, rows: Sequence[Row]) -> StepSums:
        """The gradient of the rows' token mean, added to those of the draft's parameters."""
        ...


class OwnGradients:
    """By this process alone."""

    def __init__(self, target: Target, config: LearnConfig):
        self.target, self.config = target, config
        self.weighting = step_weighting(config.weights, config.step_decay)

    def add(self, drafter: torch.nn.Module, rows: Sequence[Row]) -> StepSums:
        return self.add_share(drafter, rows, total_weight(rows))

    def add_share(self, drafter: torch.nn.Module, rows: Sequence[Row], weight: float) -> StepSums:
        """Of some rows of a batch whose rows weigh `weight` together."""
        loss, sums = self.share(drafter, rows, weight)
        loss.backward()
        return sums

    def share(
        self, drafter: torch.nn.Module, rows: Sequence[Row], weight: float
    ) -> tuple[torch.Tensor, StepSums]:
        """What those rows add to the loss of the batch."""
        unrolled = unrolled_loss(
            drafter,
            LiveSource(self.target),
            padded_rows(rows, self.target.device),
            num_steps=self.config.unroll,
            weighting=self.weighting,
            kind=kind_of(self.config.divergence),
        )
        return unrolled.total / (unrolled.scale * weight), unrolled.sums


def total_weight(rows: Sequence[Row]) -> float:
    return float(sum(row.weights.sum(dtype="float64") for row in rows))
