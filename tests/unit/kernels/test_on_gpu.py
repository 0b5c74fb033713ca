"""Real vocabularies on a CUDA device: the compiled kernels against the references, and their
distribution as the audit has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.kernels.divergence.kind import PARAMETERS, kind_of
from draftsmith.kernels.divergence.rows import RowInputs, divergence_rows, draft_columns
from draftsmith.kernels.sampling.random_streams import (
    Purpose,
    round_seeds,
    sample,
    sample_without_replacement,
    uniform,
)
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import DraftTree, Verdict

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("size", [32_000, 128_256, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "verify, true_q",
    [(verify_chain, True), (verify_chain, False), (verify_block, True)],
    ids=["chain", "chain without q", "block"],
)
def test_verification_equals_the_reference(
    verify: Callable[..., Verdict],
    true_q: bool,
    dtype: torch.dtype,
    size: int,
    poisoned_empty: None,
) -> None:
    generator = torch.Generator(CUDA).manual_seed(size)
    rows, depth = 64, 5
    lengths = torch.randint(0, depth + 1, (rows,), generator=generator, device=CUDA)
    p = 3 * torch.randn(int((lengths + 1).sum()), size, generator=generator, device=CUDA)
    first = torch.cumsum(lengths + 1, 0) - (lengths + 1)
    along = p[first[:, None] + torch.minimum(torch.arange(depth, device=CUDA), lengths[:, None])]
    q = along + 0.5 * torch.randn(rows, depth, size, generator=generator, device=CUDA)
    p, q = p.to(dtype), q.to(dtype)
    seeds, positions = torch.arange(rows, device=CUDA) * 77, torch.arange(rows, device=CUDA)
    noise = round_seeds(seeds, positions)
    drafts = torch.stack(
        [sample(q[:, i].float(), noise, positions + i, Purpose.DRAFT) for i in range(depth)], dim=1
    )
    arguments = p, drafts, lengths, q if true_q else None, seeds, positions
    ours, reference = (verify(*arguments, impl=impl) for impl in ("triton", "torch"))
    # A draw within float32 rounding of its rival may fall either way: about one row in a thousand.
    assert (ours.tokens != reference.tokens).any(dim=1).sum() <= 1
    assert (ours.accepted > 1).any() or not true_q


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARAMETERS)
def test_divergences_equal_the_reference(
    name: str, dtype: torch.dtype, poisoned_empty: None
) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    draft = (3 * torch.randn(33, 32_000, generator=generator, device=CUDA)).to(dtype)
    target = (3 * torch.randn(33, 151_936, generator=generator, device=CUDA)).to(dtype)
    vocab_map = torch.randperm(151_936, generator=generator, device=CUDA)[:32_000]
    tokens = torch.randint(151_936, (33,), generator=generator, device=CUDA)
    weights = torch.rand(33, generator=generator, device=CUDA)
    from draftsmith.kernels.divergence.rows_triton import divergence_rows_triton

    kind, columns = kind_of(name), draft_columns(tokens, vocab_map)
    exact = divergence_rows(
        kind, RowInputs(draft.double(), target.double(), weights.double(), vocab_map, columns)
    )
    ours = divergence_rows_triton(kind, RowInputs(draft, target, weights, vocab_map, columns))
    for field in ("loss", "alpha", "keep", "outside"):
        torch.testing.assert_close(
            getattr(ours, field), getattr(exact, field).float(), rtol=1e-4, atol=1e-5
        )
    # Where q = p up to rounding a token may fall on either side of the sets that the
    # acceptance-based ones sum over.
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    # Most entries are far below any one tolerance, so that the rows as a whole are compared.
    errors = (ours.grad.double() - exact.grad).norm(dim=1)
    assert (errors <= tolerance * exact.grad.norm(dim=1)).all()


def wide_trees(
    rows: int, width: int, size: int
) -> tuple[torch.Tensor, DraftTree, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`width` children of the root, and as many of each of those: target rows, tree, draft rows,
    seeds, positions."""
    generator = torch.Generator(CUDA).manual_seed(size)
    num_nodes = width + width * width
    p = 3 * torch.randn(rows, num_nodes + 1, size, generator=generator, device=CUDA)
    q = p[:, : width + 1] + 1.5 * torch.randn(
        rows, width + 1, size, generator=generator, device=CUDA
    )
    seeds, positions = torch.arange(rows, device=CUDA) * 77, torch.arange(rows, device=CUDA)
    tokens = [
        sample_without_replacement(q[:, slot], seeds, positions + (slot > 0), Purpose.DRAFT, width)
        for slot in range(width + 1)
    ]
    parents = torch.tensor(
        [-1] * width + [i for i in range(width) for _ in range(width)], device=CUDA
    ).expand(rows, -1)
    tree = DraftTree(torch.cat(tokens, dim=1), parents, torch.full((rows,), num_nodes, device=CUDA))
    return p.flatten(0, 1), tree, q.flatten(0, 1), seeds, positions


@pytest.mark.parametrize("size", [32_000, 128_256, 151_936])
@pytest.mark.parametrize("told", [True, False])
def test_tree_verification_equals_the_reference(
    size: int, told: bool, poisoned_empty: None
) -> None:
    rows, width = 32, 3
    p, tree, q, seeds, positions = wide_trees(rows, width, size)
    q_rows = torch.full((rows, 13), -1, device=CUDA)
    q_rows[:, : width + 1] = torch.arange(rows * (width + 1), device=CUDA).view(rows, -1)
    distributions = (q, q_rows) if told else (None, None)
    ours, reference = (
        verify_tree(p, tree, *distributions, seeds, positions, impl=impl)
        for impl in ("triton", "torch")
    )
    assert (ours.tokens != reference.tokens).any(dim=1).sum() <= 1
    assert (ours.nodes[:, 0] > 0).any(), "a later sibling is kept somewhere"


def test_streams_are_the_cpus() -> None:
    seeds, positions = torch.arange(-500, 500), torch.arange(1000) * 7
    for purpose in Purpose:
        assert torch.equal(
            uniform(seeds.to(CUDA), positions.to(CUDA), purpose).cpu(),
            uniform(seeds, positions, purpose),
        )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_compiled_kernels_pass_the_audit() -> None:
    from draftsmith.serve.audit.config import AuditConfig
    from draftsmith.serve.audit.kernels import audit_kernels

    report = audit_kernels(AuditConfig(kernels=True, device="cuda", impl="triton"))
    assert report.verdict == "lossless", report.lines()
