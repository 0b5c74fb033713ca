"""The paged pass against plain attention over each row's whole context."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.kernels.attention import paged_compiled, paged_torch
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.paged_compiled import MOST_QUERIES, CompiledContext, kernel
from draftsmith.kernels.attention.paged_torch import GatheredContext
from draftsmith.kernels.attention.pool import Chunk, PagedPool, PassLayout, Scoring
from draftsmith.kernels.measured import Choices
from tests.unit.kernels.attention.rows import Case, Row, run_rows

BLOCK, DIM = 4, 8
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    kernel(torch.float32) is None, reason="no C++ compiler, so that torch's operations serve"
)


def check_rows(
    rows: list[tuple[int, int]], options: dict[str, Any], case: Case, impl: str = "auto"
) -> None:
    """Rows of so many cached tokens and so many of the pass."""
    without_trees = [Row(begin, count, []) for begin, count in rows]
    found, expected = run_rows(without_trees, options, case._replace(impl=impl), CPU)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("heads, options", [
    ((4, 4), {}), ((4, 2), {"window": 3}), ((6, 1), {"softcap": 2.0}),
    ((4, 2), {"window": 5, "softcap": 1.0}), ((6, 1), {"sinks": True}),
    ((4, 2), {"window": Chunk(5)}), ((6, 1), {"window": Chunk(16), "sinks": True}),
])  # fmt: skip
@pytest.mark.parametrize("rows", [
    [(0, 7)],  # a prompt
    [(9, 1), (2, 1), (30, 1)],  # one token each
    [(14, 1), (15, 1), (16, 1)],  # around the end of a chunk of 5 and of 16
    [(9, 3), (2, 3), (12, 3), (5, 1), (0, 6)],  # verify rows, then others
    [(13, 5), (14, 4), (15, 2), (16, 3), (31, 1)],  # drafts that cross its end
    [(299, 2), (3, 2), (280, 2)],  # beyond what is attended together
    [(0, 300), (4, 2)],  # too many queries to fold
])  # fmt: skip
def test_every_row_attends_to_its_own_context(
    rows: list, options: dict, heads: tuple[int, int], impl: str
) -> None:
    check_rows(rows, options, Case(*heads), impl)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": Chunk(6)}, {"softcap": 2.0}])
def test_long_rows_are_attended_in_pieces(monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    """No mask has more queries than a piece, and they are those of the whole row."""
    monkeypatch.setattr(paged_torch, "_MOST_QUERIES", 4)
    queries = []
    make_part = paged_torch.GatheredContext._make_part

    def noted(context, run, window):
        queries.append(run.length)
        return make_part(context, run, window)

    monkeypatch.setattr(paged_torch.GatheredContext, "_make_part", noted)
    for rows in ([(0, 19)], [(300, 9), (4, 2), (0, 4)], [(7, 5), (0, 1), (3, 13)]):
        check_rows(rows, options, Case(), "torch")
    assert max(queries) == 4


@needs_compiler
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 40])
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"window": Chunk(70)}])
def test_the_compiled_kernel_knows_every_width(dim: int, options: dict) -> None:
    rows = [(299, 2), (0, 300), (3, MOST_QUERIES // 2), (700, 1), (40, MOST_QUERIES)]
    check_rows(rows, {"scaling": dim**-0.5, **options}, Case(key_dim=dim, value_dim=dim))


@needs_compiler
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("dim", [35, 64, 96, 256])
def test_nothing_reaches_a_query_of_a_long_row_that_it_does_not_see(
    dtype: torch.dtype, atol: float, dim: int
) -> None:
    """Vectors of tokens that come later are not finite."""
    case = Case(key_dim=dim, value_dim=dim, dtype=dtype, impl="auto", spoiled=(150, 237))
    rows = [Row(5, 300, []), Row(40, 2, []), Row(0, 200, [])]
    found, expected = run_rows(rows, {"scaling": dim**-0.5}, case, CPU)
    assert expected[:150].isfinite().all() and expected[302:452].isfinite().all()
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=1e-4, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("way", ["kernel", "torch"])
def test_long_rows_are_attended_by_the_faster_way(way: str, tmp_path: Path) -> None:
    choices = Choices(tmp_path, lambda name, _: 1.0 + (name != way))
    lengths, size = torch.tensor([2, 300, 1]), 1024
    positions = torch.cat([torch.arange(700, 702), torch.arange(300), torch.tensor([9])])
    layout = PassLayout(torch.arange(3 * size // BLOCK).view(3, -1), positions, lengths, None)
    query = torch.randn(1, 4, len(positions), 64)
    keys, values = torch.randn(3 * size, 2, 64), torch.randn(3 * size, 2, 64)
    found, of_kernel, of_torch = (
        context.attend(query, keys, values, Scoring(0.1))
        for context in (CompiledContext(BLOCK, layout, choices),
                        CompiledContext(BLOCK, layout, None), GatheredContext(BLOCK, layout))
    )  # fmt: skip
    assert torch.equal(found[[0, 1, -1]], of_kernel[[0, 1, -1]])  # whatever is beside them
    assert torch.equal(found[2:-1], (of_kernel if way == "kernel" else of_torch)[2:-1])
    assert not torch.equal(of_kernel[2:-1], of_torch[2:-1])


def pass_of(
    contexts: list[int], dtype: torch.dtype, impl: str = "auto"
) -> tuple[PagedPass, torch.Tensor]:
    """A token of each of the rows with so many positions before it, and a query of each; a row's
    numbers follow from its context alone."""
    width = -(-(max(contexts) + 1) // BLOCK)
    tables = torch.arange(1, len(contexts) * width + 1).view(len(contexts), width).flip(1)
    pool = PagedPool.empty(
        num_layers=1, num_blocks=len(contexts) * width + 1, block_size=BLOCK, num_kv_heads=2,
        key_dim=64, dtype=dtype,
    )  # fmt: skip
    queries = []
    for row, context in enumerate(contexts):
        generator = torch.Generator().manual_seed(context)
        at = torch.arange(context + 1)
        slots = tables[row, at // BLOCK] * BLOCK + at % BLOCK
        for tensor in (pool.keys[0], pool.values[0]):
            tensor[slots] = torch.randn(context + 1, 2, 64, generator=generator).to(dtype)
        queries.append(torch.randn(4, 64, generator=generator).to(dtype))
    positions, lengths = torch.tensor(contexts), torch.ones(len(contexts), dtype=torch.int64)
    query = torch.stack(queries, dim=1)[None]
    return PagedPass(pool, tables, positions, lengths, impl=impl), query


def attended(made: PagedPass, query: torch.Tensor) -> torch.Tensor:
    """[B, heads, dim] over what is in the pool."""
    pool = made.pool
    return made.context.attend(query, pool.keys[0], pool.values[0], Scoring(0.1))


@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
@pytest.mark.parametrize("num_empty", [1, 3])
def test_rows_of_no_tokens_at_the_end_change_nothing(impl: str, num_empty: int) -> None:
    """A CUDA graph has more rows than most rounds."""
    made, query = pass_of([9, 30, 3, 3], torch.float32, impl)
    tables, _, lengths, _ = made.layout
    padded = PagedPass(
        made.pool,
        torch.cat([tables, tables.new_zeros(num_empty, tables.shape[1])]),
        torch.tensor([9, 30, 3, 3]),
        torch.cat([lengths, lengths.new_zeros(num_empty)]),
        impl=impl,
    )
    torch.testing.assert_close(attended(padded, query), attended(made, query))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="a device orders its programs")
def test_splits_are_merged_in_their_order_whichever_program_is_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice over the same tickets, as a graph's replays; tickets that another pass left behind show
    that the last program alone may merge."""
    made, query = pass_of([90, 7, 61], torch.float32, "triton")
    tickets = torch.zeros(99, dtype=torch.int64)
    made.context = replace(made.context, num_splits=4, tickets=tickets)
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    set_index, found = builder.set_grid_idx, []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        monkeypatch.setattr(
            builder, "set_grid_idx", lambda x, y, z, order=order: set_index(x, y, order[z])
        )
        found.append(attended(made, query))
        assert not tickets.any()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    alone = attended(*pass_of([90, 7, 61], torch.float32, "torch"))
    torch.testing.assert_close(found[0], alone, atol=2e-6, rtol=1e-5)
    tickets.fill_(1)
    assert attended(made, query).isnan().any()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    together = attended(*pass_of([300, 7, 31, 1000], dtype))
    for row, context in enumerate([300, 7, 31, 1000]):
        assert torch.equal(attended(*pass_of([context], dtype))[0], together[row])


@needs_compiler
@pytest.mark.parametrize("window", [None, 300, Chunk(300)])
def test_a_token_has_the_same_bits_alone_and_in_a_verification(window: int | Chunk | None) -> None:
    made, _ = pass_of([1023], torch.float32)
    pool, tables, query = made.pool, made.layout.block_tables, torch.randn(1, 4, 24, 64)

    def attended_from(begin: int, length: int) -> torch.Tensor:
        run = PagedPass(pool, tables, torch.arange(begin, begin + length), torch.tensor([length]))
        queries = query[:, :, begin - 1000 : begin - 1000 + length]
        return run.context.attend(queries, pool.keys[0], pool.values[0], Scoring(0.1, window))

    for token, found in enumerate(attended_from(1000, 24)):
        assert torch.equal(attended_from(1000 + token, 1)[0], found)


@needs_compiler
def test_bfloat16_is_rounded_once() -> None:
    found, plainly = (
        attended(*pass_of([300, 7], torch.bfloat16, impl)) for impl in ("auto", "torch")
    )
    made, query = pass_of([300, 7], torch.bfloat16)
    for tensor in (*made.pool.keys, *made.pool.values):
        tensor.data = tensor.float()
    exact = attended(PagedPass(made.pool, made.layout.block_tables, torch.tensor([300, 7]),
                               made.layout.lengths, impl="torch"), query.float())  # fmt: skip
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16()) or (
        (found - exact).abs().max() <= (plainly - exact).abs().max()
    )


@needs_compiler
def test_scores_without_a_weight_are_no_weight() -> None:
    """A first stretch of scores of minus infinity, which is no NaN as long as another follows."""
    made, query = pass_of([600], torch.float32)
    slots = made.pool.slots_of(made.layout.block_tables, 0, torch.arange(600))
    made.pool.keys[0][slots] = -3e38
    query = query.abs() + 10
    found = attended(made, query)
    last = made.pool.values[0][made.pool.slots_of(made.layout.block_tables, 0, torch.tensor([600]))]
    torch.testing.assert_close(found[0], last[0].repeat_interleave(2, 0))


@needs_compiler
def test_threads_share_the_rows() -> None:
    made, query = pass_of([300, 7, 31, 100, 5], torch.float32)
    alone, threads = attended(made, query), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(attended(made, query), alone)
    finally:
        torch.set_num_threads(threads)


def test_without_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def context(**options: str) -> type:
        return type(pass_of([3], torch.float32, **options)[0].context)

    assert context(impl="torch") is GatheredContext
    monkeypatch.setattr(paged_compiled, "kernel", lambda dtype: object())
    assert context() is CompiledContext
    monkeypatch.setattr(paged_compiled, "kernel", lambda dtype: None)
    assert context() is GatheredContext


@needs_compiler
def test_the_compiled_kernel_writes_what_is_read_elsewhere_in_torch() -> None:
    """Keys and values of a pass, in blocks out of order, by the kernel and by torch."""
    pools = [
        PagedPool.empty(
            num_layers=1, num_blocks=9, block_size=BLOCK, num_kv_heads=2, key_dim=DIM, value_dim=4
        )
        for _ in range(2)
    ]
    tables = torch.tensor([[7, 2, 5], [4, 8, 1]])
    positions, lengths = torch.tensor([3, 4, 5, 11]), torch.tensor([3, 1])
    query, key = torch.randn(1, 4, 4, DIM), torch.randn(1, 2, 4, DIM)
    value = torch.randn(1, 4, 2, 4).transpose(1, 2)
    for pool, impl in zip(pools, ("auto", "torch")):
        run = PagedPass(pool, tables, positions, lengths, impl=impl)
        run.attend(0, query, key, value, Scoring(0.3))
        assert ("slots" in vars(run.context)) == (impl == "torch")
    assert pools[0].keys[0].any()
    assert torch.equal(pools[0].keys[0], pools[1].keys[0])
    assert torch.equal(pools[0].values[0], pools[1].values[0])


@needs_compiler
@pytest.mark.parametrize("position", [-1, 8])
def test_a_token_without_a_block_is_not_written(position: int) -> None:
    pool = PagedPool.empty(
        num_layers=1, num_blocks=3, block_size=BLOCK, num_kv_heads=1, key_dim=DIM
    )
    run = PagedPass(pool, torch.tensor([[1, 2]]), torch.tensor([position]), torch.tensor([1]))
    states = torch.ones(1, 1, 1, DIM)
    with pytest.raises(IndexError, match="behind the blocks"):
        run.attend(0, states, states, states, Scoring(1.0))
    assert not pool.keys[0].any()
