"""Optimizer steps of a candidate: gradient of the trainer's objective on a batch, clipping,
AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch

from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.teachers import Batch, Share
from draftsmith.drafters.target.device import fast_at_bf16
from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.train.objective.depth_weights import step_weighting
from draftsmith.train.objective.recompute import recompute_mlps
from draftsmith.train.objective.unrolled_loss import StepSums, UnrolledLoss, unrolled_loss

Trained = dict[str, torch.nn.Parameter]  # by name


class DraftOptimizer(Protocol):
    """Optimizer steps of one draft, by one process or by several."""

    def weights_changed(self) -> None: ...

    def step(self, batch: Batch, *, lr: float) -> StepSums | None: ...

    def moments(self) -> dict[str, torch.Tensor]: ...

    def fill(self, moments: Mapping[str, torch.Tensor]) -> None: ...

    def forget(self) -> None: ...


class CandidateOptimizer:
    """AdamW over the trained parameters of `drafter`, whose weights may change between steps."""

    def __init__(self, drafter: torch.nn.Module, config: LearnConfig):
        self.drafter, self.config = drafter, config
        self.weighting = step_weighting(config.unroll.weights, config.unroll.decay)
        self.device = next(drafter.parameters()).device
        self.in_bf16 = computes_in_bf16(config.dtype, self.device)
        if config.gradient_checkpointing:
            recompute_mlps(drafter, "learn.gradient_checkpointing")
        self.forget()

    def weights_changed(self) -> None:
        """Notes that weights were set from outside; every step here begins at what they are."""

    def step(self, batch: Batch | Share, *, lr: float) -> StepSums | None:
        """One step on the batch's token mean. None, and nothing changed, when the gradient is not
        finite."""
        self.adam.zero_grad(set_to_none=True)
        sums = self._backward(batch)
        limit = self.config.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(trained(self.drafter).values(), limit)
        if not bool(torch.isfinite(norm)):
            self.adam.zero_grad(set_to_none=True)
            return None
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        return sums

    def _backward(self, batch: Batch | Share) -> StepSums:
        unrolled = self.unrolled(batch)
        (unrolled.total / (unrolled.scale * batch.weight)).backward()
        return unrolled.sums

    def unrolled(self, batch: Batch | Share) -> UnrolledLoss:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.in_bf16):
            return unrolled_loss(
                self.drafter,
                batch.source,
                batch.text,
                num_steps=self.config.unroll.steps,
                weighting=self.weighting,
                kind=kind_of(self.config.divergence),
            )

    def moments(self) -> dict[str, torch.Tensor]:
        """Optimizer state as "<parameter>:<moment>", which `fill` takes back."""
        state, parameters = self.adam.state, trained(self.drafter)
        return {
            f"{name}:{key}": value
            for name, parameter in parameters.items()
            for key, value in state.get(parameter, {}).items()
        }

    def fill(self, moments: Mapping[str, torch.Tensor]) -> None:
        self.forget()
        parameters = trained(self.drafter)
        for key, value in moments.items():
            name, _, moment = key.rpartition(":")
            device = "cpu" if moment == "step" else parameters[name].device
            self.adam.state.setdefault(parameters[name], {})[moment] = value.to(device)

    def forget(self) -> None:
        """Returns to the state before the first step."""
        self.adam = torch.optim.AdamW(
            trained(self.drafter).values(),
            lr=self.config.lr,
            weight_decay=self.config.weight_decay,
            # One pass over each tensor. On an accelerator torch chooses.
            fused=True if self.device.type == "cpu" else None,
        )


def computes_in_bf16(dtype: str, device: torch.device) -> bool:
    """True where the arithmetic of `learn.dtype` is bfloat16."""
    if dtype == "auto":
        return fast_at_bf16(device)
    return dtype == "bfloat16"


def trained(drafter: torch.nn.Module) -> Trained:
    return {
        name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad
    }
