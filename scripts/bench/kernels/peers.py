"""Kernels of other libraries for the same work, where they are installed; each call keeps its own
interface.

Filters and sampling have no kernel of ours beside a reference, so that theirs is what one would
write in plain torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def installed(name: str, device: torch.device) -> bool:
    """Both peers run on CUDA only."""
    return device.type == "cuda" and importlib.util.find_spec(name) is not None


def missing(device: torch.device) -> dict[str, str]:
    """Why a peer is not in the table."""
    reasons = {}
    for name, package in (("liger", "liger_kernel"), ("vllm", "vllm")):
        if device.type != "cuda":
            reasons[name] = "runs on CUDA only"
        elif not installed(package, device):
            reasons[name] = "not installed"
    return reasons


def plain_filters(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """Top-k, then the shortest head of it whose mass reaches top-p, of logits [N, V] at one
    temperature."""
    order = (logits / temperature).sort(dim=-1, descending=True)
    kept = order.values.clone()
    kept[:, top_k:] = -torch.inf
    probs = kept.softmax(-1)
    kept = kept.masked_fill(probs.cumsum(-1) - probs >= top_p, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order.indices, kept)


def plain_sample(logits: torch.Tensor) -> torch.Tensor:
    """The race of `randomness.sample` with torch's generator in place of counted noise."""
    return (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)


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


def vllm_chain(
    p_logits: torch.Tensor, draft_tokens: torch.Tensor, q_logits: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """V1's rejection sampler over full rows of drafts; q as probabilities, as its drafters leave
    them; no bonus token."""
    from vllm.v1.sample.rejection_sampler import rejection_sample

    num_rows, depth = draft_tokens.shape
    device = p_logits.device
    of_drafts = torch.arange(len(p_logits), device=device) % (depth + 1) != depth
    target = p_logits[of_drafts].contiguous()
    draft_probs = q_logits.flatten(0, 1).softmax(-1)
    ends = torch.arange(depth, num_rows * depth + 1, depth, device=device, dtype=torch.int32)
    tokens = draft_tokens.flatten().to(torch.int32).contiguous()
    bonus = torch.zeros(num_rows, 1, dtype=torch.int32, device=device)
    sampling = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.ones(num_rows, device=device),
        generators={},
    )

    def call() -> torch.Tensor:
        probs = target.softmax(-1)
        return rejection_sample(
            tokens, [depth] * num_rows, depth, ends, draft_probs, probs, bonus, sampling
        )

    return call


def vllm_filters(logits: torch.Tensor, top_k: int, top_p: float) -> Callable[[], torch.Tensor]:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    k = torch.full((len(logits),), top_k, dtype=torch.int32, device=logits.device)
    p = torch.full((len(logits),), top_p, device=logits.device)
    # It writes into its input.
    return lambda: apply_top_k_top_p(logits.float().clone(), k, p)
