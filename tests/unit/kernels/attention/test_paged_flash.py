"""The adapter of FlashAttention-3 against attention by hand. A reference stands in for the library:
it attends by nothing but the arguments that it is given, as the library's documentation has
them, so that another layout gives another result."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.kernels import dispatch
from draftsmith.kernels.attention import paged_flash
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.paged_flash import FlashContext
from draftsmith.kernels.attention.pool import Chunk, PagedPool, TreeLayout
from draftsmith.kernels.dispatch import chooses_flash

BF16, CPU, CUDA = torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)
ROWS = {"decoding": [(9, 1), (2, 1), (30, 1), (16, 1)], "any": [(9, 3), (2, 1), (0, 6), (15, 2)]}


class Library:
    """`flash_attn_with_kvcache` in float64, with the checks of its documentation."""

    def __init__(self) -> None:
        self.calls = 0

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,  # (total_q, nheads, headdim), as cu_seqlens_q is given
        k_cache: torch.Tensor,  # (num_blocks, page_block_size, nheads_k, headdim)
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor:
        self.calls += 1
        counts = cu_seqlens_q.diff().tolist()
        assert q.dtype == k_cache.dtype == v_cache.dtype == BF16
        assert cu_seqlens_q.dtype == cache_seqlens.dtype == page_table.dtype == torch.int32
        assert q.is_contiguous() and q.dim() == 3 and k_cache.dim() == v_cache.dim() == 4
        assert cache_seqlens.shape == (len(counts),) and len(page_table) == len(counts)
        assert page_table.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert sum(counts) == len(q) and max(counts) <= max_seqlen_q and causal
        groups, size = q.shape[1] // k_cache.shape[2], k_cache.shape[1]
        outs = []
        for row, (part, seqlen) in enumerate(zip(q.split(counts), cache_seqlens.tolist())):
            pages = page_table[row, : -(-seqlen // size)].long()
            k, v = (
                cache[pages].flatten(0, 1)[:seqlen].double().repeat_interleave(groups, 1)
                for cache in (k_cache, v_cache)
            )
            scores = torch.einsum("qhd,khd->hqk", part.double(), k) * softmax_scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            place = torch.arange(len(part))[:, None] + seqlen - len(part)
            distance = place - torch.arange(seqlen)
            hidden = distance < 0
            if window_size != (-1, -1):
                hidden |= (distance > window_size[0]) | (distance < -window_size[1])
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outs).to(q.dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Stands in for the library on a CPU."""
    library = Library()
    monkeypatch.setitem(sys.modules, dispatch.FLASH_MODULE, library)  # type: ignore[arg-type]
    monkeypatch.setattr(dispatch, "_flash_obstacle", lambda device, dtype: "")
    paged_flash._library.cache_clear()
    return library


def attended(
    impl: str, rows: list[tuple[int, int]], dims: tuple[int, int] = (16, 16), **options: Any
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    pool = PagedPool.empty(
        num_layers=1, num_blocks=20, block_size=8, num_kv_heads=2, key_dim=dims[0],
        value_dim=dims[1], dtype=BF16,
    )  # fmt: skip
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    tables = torch.randperm(19, generator=generator)[: 4 * len(rows)].view(len(rows), -1) + 1
    positions = torch.cat([torch.arange(begin, begin + count) for begin, count in rows])
    lengths = torch.tensor([count for _, count in rows])
    one = PagedPass(pool, tables, positions, lengths, impl=impl)
    query = torch.randn(1, len(positions), 6, dims[0], generator=generator).to(BF16)
    new = [torch.randn(1, 2, len(positions), dim, generator=generator).to(BF16) for dim in dims]
    return one.attend(0, query.transpose(1, 2), *new, scaling=0.3, **options)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"sliding_window": 20, "softcap": 1.0}]
)
def test_the_library_is_given_the_pass(rows: str, options: dict, library: Library) -> None:
    expected = attended("torch", ROWS[rows], **options)
    found = attended("flash", ROWS[rows], **options)
    assert library.calls == 1 and found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_values_may_have_a_width_of_their_own(library: Library) -> None:
    expected = attended("torch", ROWS["any"], (192, 128))
    torch.testing.assert_close(
        attended("flash", ROWS["any"], (192, 128)), expected, atol=2e-2, rtol=2e-2
    )
    assert library.calls == 1


@pytest.mark.parametrize(
    "options, dims, reason",
    [
        ({"sinks": torch.zeros(6, dtype=BF16)}, (16, 16), "with sinks"),
        ({"sliding_window": Chunk(4)}, (16, 16), "in chunks"),
        ({}, (20, 20), "heads of 20 and 20 dimensions"),
        ({}, (16, 8), "heads of 16 and 8 dimensions"),
        ({}, (576, 512), "heads of 576 and 512 dimensions"),
    ],
)
def test_what_the_library_does_not_take_is_refused(
    options: dict, dims: tuple[int, int], reason: str, library: Library
) -> None:
    with pytest.raises(UserError, match=f"cannot attend {reason}; use impl 'triton'"):
        attended("flash", ROWS["decoding"], dims, **options)
    assert library.calls == 0


def test_trees_are_refused(library: Library) -> None:
    pool = PagedPool.empty(num_layers=1, num_blocks=2, block_size=8, num_kv_heads=1, key_dim=16)
    numbers = torch.zeros(1, dtype=torch.int64)
    tree = TreeLayout(numbers, numbers, numbers)
    with pytest.raises(UserError, match="trees"):
        PagedPass(pool, numbers[None], numbers, numbers + 1, tree=tree, impl="flash")


def test_auto_leaves_what_the_library_does_not_take_to_our_kernel(library: Library) -> None:
    pool = PagedPool.empty(
        num_layers=1, num_blocks=3, block_size=8, num_kv_heads=1, key_dim=16, dtype=BF16
    )
    table, positions, lengths = torch.tensor([[1], [2]]), torch.tensor([3, 5]), torch.ones(2).long()
    found = FlashContext.of(8, table, positions, lengths, may_fall_back=True)
    options: dict[str, Any] = {"scaling": 1.0, "window": Chunk(4), "softcap": None, "sinks": None}
    query = torch.randn(1, 2, 2, 16).to(BF16)
    out = found.attend(query, pool.keys[0], pool.values[0], **options)
    assert out.shape == (2, 2, 16) and library.calls == 0


def test_auto_is_the_library_for_decoding_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_is_installed", lambda module: module == dispatch.FLASH_MODULE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert chooses_flash("auto", CUDA, BF16, is_decoding=True)
    assert not chooses_flash("auto", CUDA, BF16, is_decoding=False)
    assert not chooses_flash("auto", CUDA, torch.float32, is_decoding=True)
    assert not chooses_flash("auto", CPU, BF16, is_decoding=True)
    assert not chooses_flash("triton", CUDA, BF16, is_decoding=True)
    assert chooses_flash("flash", CUDA, BF16, is_decoding=False)


@pytest.mark.parametrize(
    "device, dtype, capability, installed, reason",
    [
        (CPU, BF16, (9, 0), True, "needs a CUDA tensor"),
        (CUDA, BF16, (9, 0), False, "is not installed"),
        (CUDA, torch.float32, (9, 0), True, "not torch.float32"),
        (CUDA, BF16, (10, 0), True, "not sm_100"),
    ],
)
def test_asking_for_it_where_it_cannot_run_raises(
    device: torch.device,
    dtype: torch.dtype,
    capability: tuple[int, int],
    installed: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_is_installed", lambda module: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(UserError, match=f"impl 'flash' cannot run on .*{reason}"):
        chooses_flash("flash", device, dtype, is_decoding=True)
    assert not chooses_flash("auto", device, dtype, is_decoding=True)
