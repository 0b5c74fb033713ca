"""Sums of a logging window, kept on the device and read once when the window is logged. S unrolled steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftsmith.kernels.divergence.kind import Kind
from draftsmith.train.objective.rounds_of_text import deepen, predicted_tau
from draftsmith.train.objective.unrolled_loss import UnrolledLoss


class MetricWindow:
    """Adds up every batch since the last log line."""

    # Batches whose text is walked for the predicted tau; the walk runs on the host, so a few recent ones must do.
    WALKED = 4

    def __init__(self, depths: int, kind: Kind) -> None:
        self.depths = depths  # draft positions of a round that the predicted tau assumes
        self.name = kind.metric
        self.sums: torch.Tensor | None = None  # [4, S] weight, divergence, alpha, outside
        self.walked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, unrolled: UnrolledLoss, loss_mask: torch.Tensor) -> None:
        sums = torch.stack([value.detach().double() for value in unrolled.sums])
        self.sums = sums if self.sums is None else self.sums + sums
        if unrolled.keep is not None:
            self.walked = [*self.walked, (unrolled.keep.detach(), loss_mask)][-self.WALKED :]

    def drain(self, reduce: Callable[..., torch.Tensor]) -> dict[str, float]:
        """forward_kl_s (or what is trained by), alpha_s (s from 1) and outside of the window over all ranks, tau of this rank's
        last batches; the window is empty afterwards."""
        if self.sums is None:
            return {}
        sums = reduce(self.sums, reduction="sum")
        weight, divergence, alpha, outside = (sums / sums[0].clamp(min=1e-9)).tolist()
        metrics = {}
        for depth in range(len(weight)):
            metrics[f"{self.name}_{depth + 1}"] = divergence[depth]
            metrics[f"alpha_{depth + 1}"] = alpha[depth]
        metrics["outside"] = outside[0]
        tau = self._tau()
        if tau is not None:
            metrics["tau"] = tau
        self.sums, self.walked = None, []
        return metrics

    def _tau(self) -> float | None:
        """Of this rank's recent batches."""
        taus = [predicted_tau(deepen(keep, self.depths), loss_mask) for keep, loss_mask in self.walked]
        known = [tau for tau in taus if tau is not None]
        return sum(known) / len(known) if known else None
