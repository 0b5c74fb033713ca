"""Liger's kernels for the same work, where it is installed; it runs on CUDA only."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch


def has_liger(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def liger_forward_kl(
    hidden: torch.Tensor,
    head: torch.Tensor,
    target_logits: torch.Tensor,
    accumulate: torch.dtype | None,
) -> Callable[[], Any]:
    """KL to given probabilities; they are made here, outside the measured time."""
    from liger_kernel.transformers.fused_linear_kl_div import LigerFusedLinearKLDivLoss

    loss = LigerFusedLinearKLDivLoss(reduction="sum", accum_dtype=accumulate)
    probs = target_logits.softmax(-1)
    return lambda: torch.autograd.grad(loss(hidden, head, probs), (hidden, head))


def liger_jsd(
    hidden: torch.Tensor, head: torch.Tensor, target_hidden: torch.Tensor, target_head: torch.Tensor
) -> Callable[[], Any]:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    loss = LigerFusedLinearJSD(jsd_beta=0.5)
    return lambda: torch.autograd.grad(
        loss(hidden, head, target_hidden, target_head, None), (hidden, head)
    )
