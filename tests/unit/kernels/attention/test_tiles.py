"""Tiles fit the device, and what is attended does not depend on them."""

from __future__ import annotations

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.kernels.attention import paged_triton, tiles
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool, Scoring, TreeLayout
from draftsmith.kernels.attention.tiles import DeviceLimits, HeadKind, Widths, choose_tiles

KIB = 1024
MLA = HeadKind(128, Widths.of(576, 512), 2, has_bits=False)


@pytest.mark.parametrize("shared", [99, 163, 227])
@pytest.mark.parametrize("tokens", [1, 6, 512])
def test_many_heads_on_one_are_parts_that_fit(shared: int, tokens: int) -> None:
    """128 heads on one of 576 and 512 dimensions, which took 360,704 bytes when they were one tile."""
    found = choose_tiles(MLA, tokens, shared * KIB)
    assert found.parts * found.queries >= 128 and found.tokens >= 1
    assert (found.queries * 576 + found.keys * 2 * (576 + 512)) * 2 <= shared * KIB


def test_what_cannot_fit_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"576 and 512 .* needs \d+ bytes .* has 65536; use"):
        choose_tiles(MLA, 1, 64 * KIB)


def attended(groups: int, dims: tuple[int, int], *, has_tree: bool) -> torch.Tensor:
    """Two rows of 3 and 2 tokens with 40 keys and 7 before them."""
    generator = torch.Generator().manual_seed(0)
    pool = PagedPool.empty(
        num_layers=1, num_blocks=8, block_size=16, num_kv_heads=2, key_dim=dims[0],
        value_dim=dims[1],
    )  # fmt: skip
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    positions = torch.tensor([40, 41, 42, 7, 8])
    tree = None
    if has_tree:  # the third token is a sibling of the second
        tree = TreeLayout(
            positions, torch.tensor([1, 3, 5, -1, -1]), torch.tensor([40, 40, 40, 0, 0])
        )
        positions = torch.tensor([40, 41, 41, 7, 8])
    one = PagedPass(
        pool, torch.tensor([[1, 2, 3], [4, 5, 6]]), positions, torch.tensor([3, 2]), tree=tree,
        impl="triton",
    )  # fmt: skip
    query = torch.randn(1, 2 * groups, 5, dims[0], generator=generator)
    new = [torch.randn(1, 2, 5, dim, generator=generator) for dim in dims]
    return one.attend(0, query, *new, Scoring(0.2))


@pytest.mark.parametrize("has_tree", [False, True])
@pytest.mark.parametrize("groups, dims", [(20, (40, 24)), (34, (24, 40)), (3, (80, 80))])
def test_results_do_not_depend_on_tiles(
    groups: int, dims: tuple[int, int], has_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile a row, then parts of heads and small steps, as little shared memory gives them."""
    monkeypatch.setattr(tiles, "_FEWEST_QUERIES", 64)
    whole = attended(groups, dims, has_tree=has_tree)
    monkeypatch.setattr(tiles, "_FEWEST_QUERIES", 16)
    kind = HeadKind(groups, Widths.of(*dims), 4, has_bits=False)
    least = tiles._shared_bytes(kind, 16, 16)
    monkeypatch.setattr(paged_triton, "limits_of", lambda device: DeviceLimits(1, least))
    assert choose_tiles(kind, 3, least).parts == -(-groups // 16)
    parts = attended(groups, dims, has_tree=has_tree)
    torch.testing.assert_close(parts, whole, atol=2e-6, rtol=1e-5)
