"""Less memory for activations: MLPs of a draft that run again in the backward pass."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils import checkpoint

from draftsmith.errors import UserError


def recompute_mlps(drafter: torch.nn.Module, option: str) -> None:
    """Has each MLP of the draft run again, as the option of this name asks."""
    mlps = [module for name, module in drafter.named_modules() if name.rpartition(".")[2] == "mlp"]
    if not mlps:
        raise UserError(
            f"option {option!r} has nothing to recompute in a draft of family "
            f"{drafter.family!r}; leave it out"
        )
    for mlp in mlps:
        mlp.forward = partial(checkpoint.checkpoint, mlp.forward, use_reentrant=False)
