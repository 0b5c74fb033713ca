"""The optimizer of a candidate: here AdamW, whole in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from draftsmith.distill.config import LearnConfig
from draftsmith.distill.learn.gradients import Gradients
from draftsmith.train.data.roles import Row
from draftsmith.train.objective.unrolled_loss import StepSums


class Optimizer(Protocol):
    """The draft's weights may be changed between steps by whoever made it."""

    def step(self, rows: Sequence[Row], *, lr: float) -> StepSums | None:
        """By the gradient of the rows' token mean. None, and nothing changed, when that is not
        finite."""
        ...

    def moments(self) -> dict[str, torch.Tensor]:
        """As "<parameter>:<moment>"; `fill` takes them back, wherever the optimizer is held."""
        ...

    def fill(self, moments: Mapping[str, torch.Tensor]) -> None: ...

    def forget(self) -> None:
        """As if no step had been taken."""
        ...

    def close(self) -> None:
        """The candidate is given up."""
        ...


NewOptimizer = Callable[[torch.nn.Module], Optimizer]


class WholeOptimizer:
    def __init__(self, gradients: Gradients, config: LearnConfig, drafter: torch.nn.Module):
        self.gradients, self.config, self.drafter = gradients, config, drafter
        self.forget()

    def step(self, rows: Sequence[Row], *, lr: float) -> StepSums | None:
        self.adam.zero_grad(set_to_none=True)
        sums = self.gradients.add(self.drafter, rows)
        norm = torch.nn.utils.clip_grad_norm_(trained(self.drafter).values(), self.config.clip)
        if not bool(torch.isfinite(norm)):
            self.adam.zero_grad(set_to_none=True)
            return None
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        return sums

    def moments(self) -> dict[str, torch.Tensor]:
        state, parameters = self.adam.state, trained(self.drafter)
        return {
            f"{name}:{key}": one
            for name, held in parameters.items()
            for key, one in state.get(held, {}).items()
        }

    def fill(self, moments: Mapping[str, torch.Tensor]) -> None:
        self.forget()
        parameters = trained(self.drafter)
        for key, value in moments.items():
            name, _, moment = key.rpartition(":")
            place = "cpu" if moment == "step" else parameters[name].device
            self.adam.state.setdefault(parameters[name], {})[moment] = value.to(place)

    def forget(self) -> None:
        self.adam = new_adam(self.drafter, self.config)

    def close(self) -> None:
        """Nobody else holds a part."""


def trained(drafter: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {
        name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad
    }


def new_adam(drafter: torch.nn.Module, config: LearnConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        trained(drafter).values(), lr=config.lr, weight_decay=config.weight_decay
    )
