"""The Triton row kernel against the reference, for every divergence."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.kernels.divergence.fused import divergence
from draftsmith.kernels.divergence.kind import PARAMETERS, DivergenceKind, kind_of
from draftsmith.kernels.divergence.rows import RowInputs, divergence_rows, draft_columns

pytestmark = pytest.mark.usefixtures("poisoned_empty")
KINDS = [kind_of(name) for name in PARAMETERS]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.metric)


def make_rows(
    num_draft: int, num_target: int, subset: bool, dtype: torch.dtype, device: torch.device
) -> RowInputs:
    """Row 1 has target logits of -inf, row 2 no weight and NaN for logits, row 4 distributions that
    are nearly one-hot."""
    generator = torch.Generator().manual_seed(num_draft)
    draft = 3 * torch.randn(5, num_draft, generator=generator)
    target = 3 * torch.randn(5, num_target, generator=generator)
    draft[2], target[1, 2:] = math.nan, -math.inf
    draft[4, 0], target[4, -1] = 60.0, 50.0
    vocab_map = (
        torch.randperm(num_target, generator=generator)[:num_draft].to(device) if subset else None
    )
    tokens = torch.randint(num_target, (5,), generator=generator).to(device)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], device=device)
    return RowInputs(
        draft.to(device, dtype),
        target.to(device, dtype),
        weights,
        vocab_map,
        draft_columns(tokens, vocab_map),
    )


@every_kind
@pytest.mark.parametrize(
    "num_draft, num_target, subset, dtype",
    [
        (37, 37, False, torch.float32),
        (19, 70, True, torch.bfloat16),
        (64, 64, False, torch.bfloat16),
        (1, 5, True, torch.float32),
    ],
)
def test_rows_equal_the_reference(
    kind: DivergenceKind,
    num_draft: int,
    num_target: int,
    subset: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    from draftsmith.kernels.divergence.rows_triton import divergence_rows_triton

    rows = make_rows(num_draft, num_target, subset, dtype, device)
    reference = divergence_rows(kind, rows)
    ours = divergence_rows_triton(kind, rows, block=16)
    counted = rows.weights != 0
    # float32 sums of at most 70 terms; bfloat16 only rounds the gradient that is written. tvd++
    # takes roots: that of a small mass has half its digits, and the arc of one within 6e-8 of 1 is
    # known to 5e-4.
    loose = 10 if kind.name == "tvd++" else 1
    torch.testing.assert_close(
        ours.loss, reference.loss, rtol=2e-5, atol=1e-3 if kind.name == "tvd++" else 2e-6
    )
    torch.testing.assert_close(ours.alpha[counted], reference.alpha[counted], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.keep[counted], reference.keep[counted], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        ours.outside[counted], reference.outside[counted], rtol=1e-5, atol=1e-6
    )
    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (1e-2, 1e-2)
    torch.testing.assert_close(ours.grad, reference.grad, rtol=rtol * loose, atol=atol * loose)
    assert torch.equal(ours.grad[2], torch.zeros_like(ours.grad[2]))
    assert ours.grad.data_ptr() == rows.draft_logits.data_ptr(), "a second [t, V] was allocated"
    assert num_draft == 1 or (ours.grad[counted].abs().sum(-1) > 0).any()


@every_kind
def test_gradients_through_the_whole_function(kind: DivergenceKind, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 4, generator=generator).to(device).requires_grad_()
    head = torch.randn(33, 4, generator=generator).to(device).requires_grad_()
    target = torch.randn(6, 33, generator=generator).to(device)
    tokens = torch.arange(6, device=device)
    weights = torch.ones(6, device=device)
    grads = {}
    for impl in ("torch", "triton"):
        result = divergence(
            kind,
            hidden,
            head,
            lambda rows: target[rows],
            weights,
            tokens=tokens,
            impl=impl,
            chunk_size=4,
        )
        grads[impl] = (result.loss, *torch.autograd.grad(result.loss, (hidden, head)))
    for ours, reference in zip(grads["triton"], grads["torch"]):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


def test_without_tokens_nothing_is_kept(device: torch.device) -> None:
    from draftsmith.kernels.divergence.rows_triton import divergence_rows_triton

    rows = make_rows(37, 37, False, torch.float32, device)._replace(columns=None)
    reference = divergence_rows(kind_of("tv"), rows)
    ours = divergence_rows_triton(kind_of("tv"), rows)
    assert ours.keep is None
    torch.testing.assert_close(ours.grad, reference.grad)
    with pytest.raises(ValueError, match="needs the tokens"):
        divergence_rows_triton(kind_of("ce"), rows)
