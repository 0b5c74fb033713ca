"""Real vocabularies on a CUDA device: the compiled kernels against the references, and their law over a million rounds."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.divergence_kind import PARAMETERS, kind_of
from draftsmith.kernels.divergence_rows import RowInputs, divergence_rows
from draftsmith.kernels.randomness import Purpose, sample, uniform
from draftsmith.kernels.verify import verify_chain

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("size", [32_000, 128_256, 151_936])
@pytest.mark.parametrize("true_q", [True, False])
def test_verification_equals_the_reference(size: int, true_q: bool, poisoned_empty: None) -> None:
    generator = torch.Generator(CUDA).manual_seed(size)
    rows, depth = 64, 5
    lengths = torch.randint(0, depth + 1, (rows,), generator=generator, device=CUDA)
    p = 3 * torch.randn(int((lengths + 1).sum()), size, generator=generator, device=CUDA)
    q = 3 * torch.randn(rows, depth, size, generator=generator, device=CUDA)
    first = torch.cumsum(lengths + 1, 0) - (lengths + 1)
    q[:, 0] = 0.3 * q[:, 0] + p[first]  # so that a good part of the drafts is kept
    seeds, positions = torch.arange(rows, device=CUDA) * 77, torch.arange(rows, device=CUDA)
    drafts = torch.stack([sample(q[:, i], seeds, positions + i, Purpose.DRAFT) for i in range(depth)], dim=1)
    arguments = p, drafts, lengths, q if true_q else None, seeds, positions
    ours, reference = verify_chain(*arguments, impl="triton"), verify_chain(*arguments, impl="torch")
    # A draw within float32 rounding of its rival may fall either way: about one row in a thousand.
    assert (ours.tokens != reference.tokens).any(dim=1).sum() <= 1
    assert (ours.accepted > 0).any() or not true_q


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARAMETERS)
def test_divergences_equal_the_reference(name: str, dtype: torch.dtype, poisoned_empty: None) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    draft = (3 * torch.randn(33, 32_000, generator=generator, device=CUDA)).to(dtype)
    target = (3 * torch.randn(33, 151_936, generator=generator, device=CUDA)).to(dtype)
    vocab_map = torch.randperm(151_936, generator=generator, device=CUDA)[:32_000]
    tokens = torch.randint(151_936, (33,), generator=generator, device=CUDA)
    weights = torch.rand(33, generator=generator, device=CUDA)
    from draftsmith.kernels.divergence_triton import divergence_rows_triton

    kind = kind_of(name)
    exact = divergence_rows(kind, RowInputs(draft.double(), target.double(), weights.double(), vocab_map, tokens))
    ours = divergence_rows_triton(kind, RowInputs(draft, target, weights, vocab_map, tokens))
    for field in ("loss", "alpha", "keep", "outside"):
        torch.testing.assert_close(getattr(ours, field), getattr(exact, field).float(), rtol=1e-4, atol=1e-5)
    # Where q = p up to rounding a token may fall on either side of the sets that the acceptance-based ones sum over.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(ours.grad.float(), exact.grad.float(), rtol=1e-2, atol=tolerance)


def test_streams_are_the_cpus() -> None:
    seeds, positions = torch.arange(-500, 500), torch.arange(1000) * 7
    for purpose in Purpose:
        assert torch.equal(uniform(seeds.to(CUDA), positions.to(CUDA), purpose).cpu(), uniform(seeds, positions, purpose))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_compiled_kernels_pass_the_audit() -> None:
    from draftsmith.serve.audit_config import AuditConfig
    from draftsmith.serve.audit_kernels import audit_kernels

    report = audit_kernels(AuditConfig(kernels=True, device="cuda", impl="triton"))
    assert report.verdict == "lossless", report.lines()
