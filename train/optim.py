"""Optimizer and schedule of a run: Muon with AdamW, the clock of steps and time, the learning rate.

Muon (torch.optim.Muon) is for the matrices inside a draft, AdamW for all else, in one optimizer as
the Trainer expects it. Muon makes every direction of a matrix's update equally long, which suits
layers; tables, whose rows are tokens, and vectors stay with AdamW, as its authors have it. Its
updates are scaled to those of AdamW: one learning rate and schedule fit both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import broadcast
from torch.optim import AdamW, Muon, Optimizer

from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import pins
from draftsmith.train.config import OptimConfig

BETAS = (0.9, 0.95)  # of AdamW, in training that is not online
MUON_MOMENT = "momentum_buffer"  # the only one of Muon


def muon_with_adamw(
    drafter: torch.nn.Module,
    *,
    num_tokens: int,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    rank: int = 0,
    processes: int = 1,
) -> MuonWithAdamW:
    """`num_tokens`: rows of the draft's head, which distinguish a table from a matrix. `processes`
    hold the same weights and gradients, and this one is `rank` of them."""
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    matrices = [
        one
        for one in trained
        if one.ndim == 2 and num_tokens not in one.shape and min(one.shape) > 1
    ]
    tables = [one for one in trained if one.ndim == 2 and num_tokens in one.shape]
    if not matrices:
        raise UserError(
            "optimizer is 'muon', but the draft holds no matrix that it trains; give 'adamw'"
        )
    known = {id(one) for one in (*matrices, *tables)}
    vectors = [one for one in trained if id(one) not in known]
    groups = [
        {"params": tables, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    muon = DraftMuon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    muon.rank, muon.processes = rank, processes
    # Fused: in one pass over a table.
    return MuonWithAdamW(muon, AdamW(groups, lr=lr, betas=betas, fused=True))


class DraftMuon(Muon):
    """torch's Muon, but the updates of weights on a CPU are made orthogonal in float32: torch does
    it in bfloat16, which a processor without such instructions multiplies many times more slowly.
    Each of several processes does it for a share of the weights.
    """

    rank, processes = 0, 1

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            lr = group["lr"]
            weights = [one for one in group["params"] if one.grad is not None]
            # The larger ones by turns.
            owners = {
                id(one): turn % self.processes
                for turn, one in enumerate(sorted(weights, key=torch.Tensor.numel, reverse=True))
            }
            updates = [self._update(one, group, owners[id(one)] == self.rank) for one in weights]
            for weight, update in zip(weights, updates, strict=True):
                if self.processes > 1:
                    broadcast(update, owners[id(weight)])
                weight.mul_(1 - lr * group["weight_decay"])
                # The root mean square of AdamW's updates.
                weight.add_(update, alpha=-0.2 * lr * math.sqrt(max(weight.shape)))
        return loss

    def _update(self, weight: torch.Tensor, group: dict[str, Any], is_own: bool) -> torch.Tensor:
        """Takes the gradient into the momentum; the update, made orthogonal if it is this process's
        own."""
        state, momentum = self.state[weight], group["momentum"]
        if not state:
            state[MUON_MOMENT] = torch.zeros_like(weight.grad)
        mean = state[MUON_MOMENT].lerp_(weight.grad, 1 - momentum)
        update = weight.grad.lerp(mean, momentum)
        return orthogonal(update, group["ns_coefficients"]).contiguous() if is_own else update


def orthogonal(matrix: torch.Tensor, coefficients: tuple[float, float, float]) -> torch.Tensor:
    """[m, n] -> [m, n] of the same type and singular vectors, with singular values between about
    0.6 and 1.3: five steps of Newton and Schulz's iteration (Jordan, Muon). In bfloat16 on CUDA,
    elsewhere in float32 or the type of a wider matrix."""
    a, b, c = coefficients
    wide = torch.promote_types(matrix.dtype, torch.float32)
    found = matrix.to(torch.bfloat16 if pins(matrix.device) else wide)
    is_tall = len(matrix) > matrix.shape[1]
    found = found.T.contiguous() if is_tall else found
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(5):
        square = found @ found.T
        found = a * found + (b * square + c * (square @ square)) @ found
    return (found.T if is_tall else found).to(matrix.dtype)


class MuonWithAdamW(Optimizer):
    def __init__(self, *parts: Optimizer):
        self.parts = parts
        # What schedulers and accelerate look at; the parts own it.
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._show_groups()

    def _show_groups(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        # Loading replaces the groups.
        self._show_groups()


def part_of(optimizer: Optimizer, parameter: torch.nn.Parameter) -> Optimizer:
    """Optimizer whose `state` holds that of the parameter."""
    parts = optimizer.parts if isinstance(optimizer, MuonWithAdamW) else (optimizer,)
    return next(
        part
        for part in parts
        if any(one is parameter for group in part.param_groups for one in group["params"])
    )


class Clock:
    """Progress of a run bounded by steps and, optionally, by wall-clock time. `elapsed_s` survives
    a resume."""

    def __init__(self, *, total_steps: int, budget_s: float | None):
        self.total_steps = total_steps
        self.budget_s = budget_s
        self.elapsed_s = 0.0
        self.kept_s = 0.0
        self._ticked_s = time.monotonic()

    def keep(self, seconds: float) -> None:
        """Takes the time of the last evaluation off the time to train in."""
        self.kept_s = seconds
        if self.budget_s is not None:
            self.budget_s -= seconds

    def start(self, elapsed_s: float = 0.0) -> None:
        self.elapsed_s = elapsed_s
        self._ticked_s = time.monotonic()

    def tick(self) -> float:
        """Adds the time since the last tick; returns `elapsed_s`."""
        now_s = time.monotonic()
        self.elapsed_s += now_s - self._ticked_s
        self._ticked_s = now_s
        return self.elapsed_s

    def share_done(self, step: int) -> float:
        """0 at the beginning, 1 when steps or time run out. Time counts in whole ticks, so a step
        sees one value."""
        by_steps = step / self.total_steps
        by_time = self.elapsed_s / self.budget_s if self.budget_s else 0.0
        return min(1.0, max(by_steps, by_time))

    def out_of_time(self) -> bool:
        return self.budget_s is not None and self.elapsed_s >= self.budget_s


def lr_factor(config: OptimConfig, share_done: float) -> float:
    """Learning rate as a share of the peak: linear warm-up, then cosine or linear to `final`, or
    constant."""
    if share_done < config.warmup:
        # A step taken at share 0 must still learn something.
        return max(share_done / config.warmup, 0.01)
    if config.schedule == "constant":
        return 1.0
    past = (share_done - config.warmup) / max(1.0 - config.warmup, 1e-9)
    shape = 0.5 * (1.0 + math.cos(math.pi * past)) if config.schedule == "cosine" else 1.0 - past
    return config.final + (1.0 - config.final) * shape
