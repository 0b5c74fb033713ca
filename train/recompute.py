"""Gradient checkpointing of a draft: its MLPs, which hold most activations, are run again in the backward pass.

Attention is not: an unroll's steps leave their keys behind for later steps, and long texts recompute its weights anyway
(`drafters/training/unroll.py`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from draftsmith.errors import UserError


def recompute_mlps(drafter: torch.nn.Module, family: str) -> None:
    mlps = [module for name, module in drafter.named_modules() if name.rpartition(".")[2] == "mlp"]
    if not mlps:
        raise UserError(f"option 'gradient_checkpointing' has nothing to recompute in a draft of family {family!r}; leave it out")
    for mlp in mlps:
        mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)
