"""The Triton row kernel against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.kernels.divergence import forward_kl, forward_kl_rows

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_draft, num_target, subset", [(37, 37, False), (19, 70, True), (64, 64, False), (1, 5, True)])
def test_rows_equal_the_reference(
    num_draft: int, num_target: int, subset: bool, dtype: torch.dtype, device: torch.device
) -> None:
    from draftsmith.kernels.divergence_triton import forward_kl_rows_triton

    generator = torch.Generator().manual_seed(num_draft)
    draft = (3 * torch.randn(5, num_draft, generator=generator)).to(device, dtype)
    target = (3 * torch.randn(5, num_target, generator=generator)).to(device, dtype)
    target[1, 2:] = -math.inf
    vocab_map = torch.randperm(num_target, generator=generator)[:num_draft].to(device) if subset else None
    tokens = torch.randint(num_target, (5,), generator=generator).to(device)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], device=device)
    draft[2] = math.nan
    before = draft.clone()
    ours = forward_kl_rows_triton(draft, target, weights, vocab_map, tokens, block=16)
    reference = forward_kl_rows(draft, target, weights, vocab_map, tokens)
    assert torch.equal(draft.isnan(), before.isnan()) and torch.equal(draft.nan_to_num(), before.nan_to_num())
    counted = weights != 0
    # float32 sums of at most 70 terms; bfloat16 only rounds the gradient that is written.
    torch.testing.assert_close(ours.kl, reference.kl, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(ours.alpha[counted], reference.alpha[counted], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.keep[counted], reference.keep[counted], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.outside, reference.outside, rtol=1e-5, atol=1e-6)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=tolerance)
    assert torch.equal(ours.grad[2], torch.zeros_like(ours.grad[2]))


def test_gradients_through_the_whole_function(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 4, generator=generator).to(device).requires_grad_()
    head = torch.randn(33, 4, generator=generator).to(device).requires_grad_()
    target = torch.randn(6, 33, generator=generator).to(device)
    grads = {}
    for impl in ("torch", "triton"):
        result = forward_kl(hidden, head, lambda rows: target[rows], torch.ones(6, device=device), impl=impl, chunk_size=4)
        grads[impl] = (result.loss, *torch.autograd.grad(result.loss, (hidden, head)))
    for ours, reference in zip(grads["triton"], grads["torch"]):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
