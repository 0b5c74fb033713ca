"""Less memory for activations: MLPs of a draft that run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import checkpoint

from draftsmith.errors import UserError
from draftsmith.kernels.products.float32_products import faster_linears


def recompute_mlps(drafter: torch.nn.Module, option: str) -> None:
    """Has each MLP of the draft run again, as the option of this name asks."""
    mlps = [module for name, module in drafter.named_modules() if name.rpartition(".")[2] == "mlp"]
    if not mlps:
        raise UserError(
            f"option {option!r} has nothing to recompute in a draft of family "
            f"{drafter.family!r}; leave it out"
        )
    for mlp in mlps:
        again = partial(_in_the_same_products, mlp.forward)
        mlp.forward = partial(checkpoint.checkpoint, again, use_reentrant=False)


def _in_the_same_products(forward: Callable[..., Any], hidden: torch.Tensor, *others: Any) -> Any:
    # The backward pass is none of the loss's context, and must keep the same tensors.
    with faster_linears(hidden.device):
        return forward(hidden, *others)
