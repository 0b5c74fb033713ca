"""Optimizer steps of a candidate: gradient of the trainer's objective on a batch, clipping, AdamW
or Muon."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.teachers import LearningBatch
from draftsmith.drafters.target.device import fast_at_bf16
from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.train.objective.rounds_of_text import step_weighting
from draftsmith.train.objective.unrolled_loss import StepSums, UnrolledLoss, unrolled_loss
from draftsmith.train.optim import MUON_MOMENT, muon_with_adamw, part_of

Trained = dict[str, torch.nn.Parameter]  # by name
BETAS = (0.9, 0.999)
MAX_GRAD_NORM = 1.0


class CandidateOptimizer:
    """AdamW, or Muon with it, over the trained parameters of `drafter`, whose weights may change
    between steps."""

    def __init__(self, drafter: torch.nn.Module, config: LearnConfig):
        self.drafter, self.config = drafter, config
        self.weighting = step_weighting(config.unroll.weights, config.unroll.decay)
        self.device = next(drafter.parameters()).device
        self.in_bf16 = computes_in_bf16(config.dtype, self.device)
        self.forget()

    def step(self, batch: LearningBatch, *, lr: float) -> StepSums | None:
        """One step on the batch's token mean. None, and nothing changed, when the gradient is not
        finite."""
        self.adam.zero_grad(set_to_none=True)
        sums = self._backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(trained(self.drafter).values(), MAX_GRAD_NORM)
        if not bool(torch.isfinite(norm)):
            self.adam.zero_grad(set_to_none=True)
            return None
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        return sums

    def _backward(self, batch: LearningBatch) -> StepSums:
        unrolled = self.unrolled(batch)
        unrolled.mean(batch.weight).backward()
        return unrolled.sums

    def unrolled(self, batch: LearningBatch) -> UnrolledLoss:
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
        return {
            f"{name}:{key}": value
            for name, parameter in trained(self.drafter).items()
            for key, value in part_of(self.adam, parameter).state.get(parameter, {}).items()
        }

    def fill(self, moments: Mapping[str, torch.Tensor]) -> None:
        """Moments of another optimizer than the one at hand are left out."""
        self.forget()
        parameters = trained(self.drafter)
        for key, value in moments.items():
            name, _, moment = key.rpartition(":")
            part = part_of(self.adam, parameters[name])
            if (moment == MUON_MOMENT) == isinstance(part, torch.optim.Muon):
                on_host = moment == "step" and not part.param_groups[0].get("fused")
                device = "cpu" if on_host else parameters[name].device
                part.state.setdefault(parameters[name], {})[moment] = value.to(device)

    def forget(self) -> None:
        """Returns to the state before the first step."""
        if self.config.optimizer == "muon":
            self.adam: torch.optim.Optimizer = muon_with_adamw(
                self.drafter,
                num_tokens=len(self.drafter.head_weight()),
                lr=self.config.lr,
                betas=BETAS,
                weight_decay=0.0,
            )
            return
        self.adam = torch.optim.AdamW(
            trained(self.drafter).values(),
            lr=self.config.lr,
            betas=BETAS,
            weight_decay=0.0,
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
