"""Divergences at a real size on a CUDA device: peak memory and gradients beside the eager form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.kernels.divergence.fused import HeadLogits, divergence
from draftsmith.kernels.divergence.kind import kind_of

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, VOCAB = 8192, 4096, 128_256


class Pair:
    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(rows: int, scale: float) -> torch.Tensor:
            return (scale * torch.randn(rows, WIDTH, generator=generator, device="cuda")).bfloat16()

        self.hidden, self.target_hidden = normal(TOKENS, 1.0).requires_grad_(), normal(TOKENS, 1.0)
        self.head, self.target_head = (
            normal(VOCAB, 2 / WIDTH**0.5).requires_grad_(),
            normal(VOCAB, 2 / WIDTH**0.5),
        )
        self.weights = torch.ones(TOKENS, device="cuda")

    def fused(self, name: str) -> tuple[torch.Tensor, ...]:
        target = HeadLogits(self.target_hidden, self.target_head)
        loss = divergence(kind_of(name), self.hidden, self.head, target, self.weights).loss
        return torch.autograd.grad(loss, (self.hidden, self.head))

    def eager_forward_kl(self) -> tuple[torch.Tensor, ...]:
        log_q = (self.hidden @ self.head.T).float().log_softmax(-1)
        log_p = (self.target_hidden @ self.target_head.T).float().log_softmax(-1)
        return torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), (self.hidden, self.head))


def peak_bytes(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_peak_memory_is_an_eighth_of_eager() -> None:
    pair = Pair()
    eager = peak_bytes(pair.eager_forward_kl)
    for name in ("forward-kl", "jsd", "lk-alpha"):
        fused = peak_bytes(lambda name=name: pair.fused(name))
        assert fused <= eager / 8, (name, fused >> 20, eager >> 20)


def test_gradients_are_eagers() -> None:
    """bfloat16 logits and gradients of 8 bits each; their errors are independent over 8,192 rows
    and 128,256 tokens."""
    pair = Pair()
    for ours, theirs in zip(pair.fused("forward-kl"), pair.eager_forward_kl()):
        off = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert off < 0.02, float(off)
