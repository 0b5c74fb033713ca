"""Trees over the paged pool against float64 attention along each node's own path, and moving what
was kept."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.errors import UserError
from draftsmith.kernels.attention import paged_triton, tiles
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import Chunk, PagedPool, Scoring, TreeLayout, Window
from draftsmith.kernels.attention.tiles import DeviceLimits, HeadKind, Widths, choose_tiles
from tests.unit.kernels.attention.rows import Case, Row, run_rows

BLOCK = 4
CPU = torch.device("cpu")
# Each row: committed places before the pass, then parents of the pass's tokens among them (-1: the
# newest committed token). The newest committed token itself goes first; None is a row without a
# tree of so many tokens.
CHAIN = [-1, 0, 1, 2]
BUSHY = [-1, -1, 0, 0, 1, 3, 3, 6]
STAR = [-1, -1, -1, -1, -1]


ROWS = [
    [Row(9, 1, BUSHY)],
    [Row(9, 1, BUSHY), Row(3, 1, BUSHY), Row(0, 1, [-1] * 8)],  # attended together
    [Row(9, 1, CHAIN), Row(2, 3, BUSHY), Row(7, 1, []), Row(0, 6, []), Row(4, 1, STAR)],
    [Row(280, 1, BUSHY), Row(299, 2, STAR)],
    [Row(5, 1, list(range(-1, 61)))],  # the longest row of bits
]
PLAIN = [
    [Row(0, 7, [])],
    [Row(9, 3, []), Row(2, 1, []), Row(30, 1, []), Row(0, 6, []), Row(12, 2, [])],
    [Row(299, 2, []), Row(3, 2, []), Row(0, 40, [])],  # more tokens than a tile holds
]
OPTIONS = [
    {}, {"window": 3}, {"window": 7, "softcap": 1.0}, {"softcap": 2.0},
    {"sinks": True}, {"window": Chunk(3)}, {"window": Chunk(10), "softcap": 1.0},
]  # fmt: skip


# Of the kernel: every row of `ROWS` meets one of them, and another where something is not finite.
VARIANTS = [
    (Case(6, 2, impl="triton"), {"window": 3, "softcap": 1.0}),
    (Case(4, 4, impl="triton", num_splits=1), {"sinks": True}),
    (Case(6, 2, impl="triton", num_splits=3), {"window": 7, "sinks": True}),
    (Case(4, 4, impl="triton", num_splits=4), {"softcap": 2.0}),
    (Case(6, 2, impl="triton", num_splits=1), {"window": Chunk(10)}),
    (Case(4, 4, impl="triton", num_splits=3), {"window": Chunk(3), "softcap": 1.0}),
]


@pytest.mark.parametrize("impl", ["torch", "auto"])  # compiled where it can be
@pytest.mark.parametrize("options", OPTIONS)
def test_a_node_attends_along_its_own_path(options: dict, impl: str) -> None:
    for rows, heads in zip(ROWS, itertools.cycle([(4, 4), (6, 2)])):
        found, expected = run_rows(rows, options, Case(*heads, impl=impl), CPU)
        torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-4)


@st.composite
def any_rows(draw: st.DrawFn) -> list[Row]:
    """Prompts, chains, single tokens and trees of any form, in any order."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 7)))]
        rows.append(Row(draw(st.integers(0, 20)), draw(st.integers(1, 4)), parents))
    return rows


@given(any_rows(), st.sampled_from([None, 1, 2, 5, 9, Chunk(1), Chunk(2), Chunk(5), Chunk(9)]))
@settings(max_examples=60, deadline=None)
def test_any_mix_of_rows_attends_along_its_paths(rows: list[Row], window: Window | None) -> None:
    for case in (Case(), Case(impl="auto"), Case(key_dim=32, value_dim=32, impl="auto")):
        found, expected = run_rows(rows, {} if window is None else {"window": window}, case, CPU)
        torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20, Chunk(20)])
@pytest.mark.parametrize("begin", [9, 252])  # 252: nodes lie on both sides of a run of 256
def test_a_node_has_the_bits_that_it_has_in_a_chain(
    begin: int, window: Window | None, dtype: torch.dtype
) -> None:
    row, shape = Row(begin, 2, BUSHY), (begin + 14, 2, 64)
    query, *states = (torch.randn(shape).to(dtype) for _ in range(3))
    tree = TreeLayout(*map(torch.tensor, (row.places, row.ancestors, [row.first] * 10)))

    def attended(positions: list[int], of: list[int], tree: TreeLayout | None) -> torch.Tensor:
        pool = PagedPool(*([torch.cat([one[of], states[0]])] for one in states), block_size=2)
        layout = (
            torch.arange(len(of))[None],
            torch.tensor(positions),
            torch.tensor([len(positions)]),
        )
        own = query[of[-len(positions) :]].repeat(1, 3, 1).transpose(0, 1)[None]
        context = PagedPass(pool, *layout, tree=tree).context
        return context.attend(own, pool.keys[0], pool.values[0], Scoring(0.1, window))

    found = attended(row.positions, list(range(row.places[-1] + 1)), tree)
    for index, position in enumerate(row.positions):
        assert torch.equal(found[index], attended([position], row.path(index), None)[0])


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    "rows, variant", zip([*ROWS, *PLAIN], itertools.cycle(VARIANTS), strict=False)
)
def test_the_kernel_equals_the_reference(
    rows: list[Row], variant: tuple[Case, dict], device: torch.device
) -> None:
    case, options = variant
    found, expected = run_rows(rows, options, case, device)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "rows, impl, spoiled",
    [
        *zip([*ROWS, *PLAIN], itertools.repeat("torch"), itertools.cycle([(2, 3), (5,), (1,)])),
        *zip([*ROWS, *PLAIN], itertools.repeat("triton"), itertools.cycle([(1,), (2, 3), (5,)])),
        # compiled where it can be
        *zip([*PLAIN, *ROWS], itertools.repeat("auto"), itertools.cycle([(1,), (2,), (0,)])),
    ],
)
def test_what_is_not_finite_reaches_only_those_who_see_it(
    rows: list[Row], impl: str, spoiled: tuple[int, ...], device: torch.device
) -> None:
    """A target that overflows behind one drafted token gives the other positions what it would have
    given without it."""
    variants = [{}, *(options for _, options in VARIANTS)]
    options = variants[(len(rows) + spoiled[0]) % len(variants)]
    found, expected = run_rows(rows, options, Case(6, 2, impl=impl, spoiled=spoiled), device)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (20, 1)])
def test_the_kernel_takes_any_heads_and_half_floats(
    heads: int, kv_heads: int, device: torch.device
) -> None:
    """20 heads to a key need a tile of more than 16 queries for one token."""
    case = Case(
        heads, kv_heads, key_dim=20, value_dim=24, dtype=torch.float16, impl="triton", num_splits=2
    )
    found, expected = run_rows([Row(9, 1, BUSHY), Row(0, 6, []), Row(4, 2, STAR)], {}, case, device)
    # Weights and results are rounded to 11 bits.
    torch.testing.assert_close(found.double(), expected, atol=3e-3, rtol=3e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("num_splits", [None, 1, 16])
@pytest.mark.parametrize(
    "options", [{}, {"window": 1000}, {"window": Chunk(1024)}, {"softcap": 30.0}, {"sinks": True}]
)
@pytest.mark.parametrize("key_dim, value_dim", [(128, 128), (80, 80), (192, 128), (576, 512)])
def test_real_shapes_on_a_device(
    key_dim: int, value_dim: int, options: dict, num_splits: int | None
) -> None:
    rows = [
        Row(4000, 1, BUSHY),
        Row(0, 300, []),
        Row(9000, 1, CHAIN),
        Row(31, 5, STAR),
        Row(2048, 1, []),
    ]
    case = Case(32, 8, 16, key_dim, value_dim, torch.bfloat16, "triton", num_splits)
    found, expected = run_rows(
        rows, {"scaling": key_dim**-0.5, **options}, case, torch.device("cuda")
    )
    # Weights and results are rounded to 8 bits.
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_a_pass_is_captured_by_a_graph() -> None:
    """A synchronisation or a size read from the device would end the capture."""
    device = torch.device("cuda")
    pool = PagedPool.empty(
        num_layers=1, num_blocks=65, block_size=16, num_kv_heads=8, key_dim=128, device=device
    )
    tables = torch.arange(1, 65, device=device).view(4, 16)
    positions, lengths = (
        torch.tensor([40, 41, 90, 5, 6, 7], device=device),
        torch.tensor([2, 1, 1, 2], device=device),
    )
    query, key, value = (torch.randn(1, heads, 6, 128, device=device) for heads in (32, 8, 8))
    eager = (
        PagedPass(pool, tables, positions, lengths)
        .attend(0, query, key, value, Scoring(0.1))
        .clone()
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = PagedPass(pool, tables, positions, lengths).attend(
            0, query, key, value, Scoring(0.1)
        )
    graph.replay()
    assert torch.equal(captured, eager)
    # Other numbers at the same addresses.
    positions += 1
    graph.replay()
    assert torch.equal(
        captured,
        PagedPass(pool, tables, positions, lengths).attend(0, query, key, value, Scoring(0.1)),
    )


def test_a_sibling_would_be_seen_without_the_bits() -> None:
    """The control of the test above: with plain causal masks the star's nodes differ."""
    row = Row(4, 1, STAR)
    row.ancestors = [-1] * len(row.places)
    found, expected = run_rows([row], {}, Case(), CPU)
    torch.testing.assert_close(found[:2].double(), expected[:2], atol=2e-6, rtol=1e-4)
    assert ((found[2:].double() - expected[2:]).abs().amax(dim=(1, 2)) > 1e-2).all()


def test_kept_nodes_move_to_consecutive_places() -> None:
    pool = PagedPool.empty(
        num_layers=2, num_blocks=6, block_size=BLOCK, num_kv_heads=2, key_dim=3, value_dim=5
    )
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in (*pool.keys, *pool.values)]
    table = torch.tensor([4, 1, 3])
    # Places 6 and 7 are read by one and written by another.
    sources, places = torch.tensor([6, 7, 10]), torch.tensor([5, 6, 7])
    slot = {
        place: int(pool.slots_of(table[None], 0, torch.tensor([place]))[0]) for place in range(12)
    }
    assert (slot[0], slot[5], slot[10]) == (16, 5, 14)
    pool.move_slots(*(pool.slots_of(table[None], 0, of) for of in (sources, places)))
    for old, new in zip(before, (*pool.keys, *pool.values)):
        wanted = old.clone()
        for source, place in zip(sources.tolist(), places.tolist()):
            wanted[slot[place]] = old[slot[source]]
        assert torch.equal(new, wanted)


# Tiles fit the device, and what is attended does not depend on them


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
