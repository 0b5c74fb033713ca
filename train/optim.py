"""Muon (torch.optim.Muon) for the matrices inside a draft, AdamW for all else, as the one optimizer that the Trainer wants.

Muon makes every direction of a matrix's update equally long, which suits layers; tables, whose rows are tokens, and vectors stay
with AdamW, as its authors have it. Its updates are scaled to those of AdamW: one learning rate and schedule fit both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer


def muon_with_adamw(
    drafter: torch.nn.Module, *, num_tokens: int, lr: float, betas: tuple[float, float], weight_decay: float
) -> MuonWithAdamW:
    """`num_tokens`: rows of the draft's head, which tell a table from a matrix."""
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    matrices = [one for one in trained if one.ndim == 2 and num_tokens not in one.shape and min(one.shape) > 1]
    tables = [one for one in trained if one.ndim == 2 and num_tokens in one.shape]
    known = {id(one) for one in (*matrices, *tables)}
    vectors = [one for one in trained if id(one) not in known]
    groups = [{"params": tables, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    muon = Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    return MuonWithAdamW(muon, AdamW(groups, lr=lr, betas=betas))


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
