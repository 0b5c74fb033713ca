"""Trees over the paged pool against float64 attention along each node's own path, and moving what
was kept."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.paged_torch import GatheredContext
from draftsmith.kernels.attention.pool import PagedPool, TreeLayout
from draftsmith.kernels.attention.window import Chunk, Window

BLOCK, KEY_DIM, VALUE_DIM = 4, 8, 6
CPU = torch.device("cpu")
# Each row: committed places before the pass, then parents of the pass's tokens among them (-1: the
# newest committed token). The newest committed token itself goes first; None is a row without a
# tree of so many tokens.
CHAIN = [-1, 0, 1, 2]
BUSHY = [-1, -1, 0, 0, 1, 3, 3, 6]
STAR = [-1, -1, -1, -1, -1]


def bits_of(parents: list[int]) -> list[int]:
    """Bit 0 is the newest committed token, bit i + 1 node i."""
    bits: list[int] = []
    for index, parent in enumerate(parents):
        bits.append((1 if parent < 0 else bits[parent]) | 1 << (index + 1))
    return bits


class Row:
    """`begin` places are cached; the pass brings `known` tokens, then a tree under the last of
    them."""

    def __init__(self, begin: int, known: int, parents: list[int]):
        self.begin, self.known, self.parents = begin, known, parents
        self.first = begin + known - 1
        bits = bits_of(parents)
        self.positions = list(range(begin, begin + known)) + [
            self.first + bin(b).count("1") - 1 for b in bits
        ]
        self.places = list(range(begin, begin + known + len(parents)))
        self.ancestors = [-1] * known + bits

    def path(self, index: int) -> list[int]:
        """Places that token `index` of the pass sees, in the order of their positions."""
        if index < self.known:
            return list(range(self.begin + index + 1))
        node, path = index - self.known, []
        while node >= 0:
            path.append(self.first + 1 + node)
            node = self.parents[node]
        return list(range(self.first + 1)) + path[::-1]


def visible_of(path: list[int], window: Window | None) -> list[int]:
    """The end of a path that its last place sees."""
    if isinstance(window, Chunk):
        return path[(len(path) - 1) // window.size * window.size :]
    return path[-(window or 10_000) :]


def expected_rows(
    row: Row, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict
) -> torch.Tensor:
    """One token after another along its path: [heads, t, dim] x [n, kv_heads, dim] -> [t, heads,
    dim], float64."""
    groups = query.shape[0] // keys.shape[1]
    outs = []
    for index in range(query.shape[1]):
        path = visible_of(row.path(index), options.get("sliding_window"))
        k, v = (x[path].double().repeat_interleave(groups, 1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", query[:, index].double(), k) * options["scaling"]
        if options.get("softcap") is not None:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        if options.get("sinks") is not None:
            scores = torch.cat([scores, options["sinks"].double()[:, None]], -1)
        outs.append(torch.einsum("hn,nhd->hd", torch.softmax(scores, -1)[:, : len(path)], v))
    return torch.stack(outs)


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
    {}, {"sliding_window": 3}, {"sliding_window": 7, "softcap": 1.0}, {"softcap": 2.0},
    {"sinks": True}, {"sliding_window": Chunk(3)}, {"sliding_window": Chunk(10), "softcap": 1.0},
]  # fmt: skip


class Case(NamedTuple):
    """Shapes of a run; `num_splits` None leaves it to the kernel."""

    heads: int = 4
    kv_heads: int = 2
    block: int = BLOCK
    key_dim: int = KEY_DIM
    value_dim: int = VALUE_DIM
    dtype: torch.dtype = torch.float32
    impl: str = "torch"
    num_splits: int | None = None
    # tokens of every row's part of the pass whose keys and values are not finite
    spoiled: tuple[int, ...] = ()


def run_rows(
    rows: list[Row], options: dict, case: Case, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, expected), both [T, heads, value_dim]; all slots that nobody wrote are NaN."""
    generator = torch.Generator().manual_seed(0)
    options = {"scaling": 0.3, **options}
    if options.get("sinks"):
        options["sinks"] = torch.randn(case.heads, generator=generator)
    width = -(-max(row.places[-1] + 1 for row in rows) // case.block)
    tables = torch.arange(1, len(rows) * width + 1).view(len(rows), width)
    tables[::2] = tables[::2].flip(1)
    tables = tables.to(device)
    dims = (case.key_dim, case.value_dim)
    pool = PagedPool.empty(
        num_layers=2,
        num_blocks=tables.numel() + 1,
        block_size=case.block,
        num_kv_heads=case.kv_heads,
        key_dim=case.key_dim,
        value_dim=case.value_dim,
        device=device,
        dtype=case.dtype,
    )
    for tensor in (*pool.keys, *pool.values):
        tensor[case.block :] = torch.nan
    whole = []
    for index, row in enumerate(rows):
        size = row.places[-1] + 1
        keys, values = (
            torch.randn(size, case.kv_heads, dim, generator=generator).to(device, case.dtype)
            for dim in dims
        )
        slots = pool.slots_of(tables, index, torch.arange(row.begin, device=device))
        pool.keys[1][slots], pool.values[1][slots] = keys[: row.begin], values[: row.begin]
        for token in case.spoiled:
            if token < len(row.places):
                keys[row.begin + token], values[row.begin + token, :, 1] = (
                    torch.nan,
                    (-1) ** token * torch.inf,
                )
        whole.append((keys, values))
    counts = [len(row.places) for row in rows]
    query = (
        torch.randn(1, sum(counts), case.heads, case.key_dim, generator=generator)
        .to(device, case.dtype)
        .transpose(1, 2)
    )
    new = [
        torch.cat([pair[i][row.begin :] for row, pair in zip(rows, whole)]).transpose(0, 1)[None]
        for i in (0, 1)
    ]
    layout = TreeLayout(
        kv_indices=torch.tensor([place for row in rows for place in row.places], device=device),
        ancestors=torch.tensor([bits for row in rows for bits in row.ancestors], device=device),
        first=torch.tensor([row.first for row in rows], device=device).repeat_interleave(
            torch.tensor(counts, device=device)
        ),
    )
    if len(rows) == 1:  # one number for all of its tokens, as tensors of one row are made
        beside = torch.tensor([rows[0].first] + [0] * (counts[0] - 1), device=device)
        layout = layout._replace(first=beside[:1].expand(counts[0]))
    has_tree = any(row.parents for row in rows)
    positions = torch.tensor(
        [position for row in rows for position in row.positions], device=device
    )
    lengths = torch.tensor(counts, device=device)
    one_pass = PagedPass(
        pool, tables, positions, lengths, tree=layout if has_tree else None, impl=case.impl
    )
    if case.num_splits is not None:
        one_pass.context = replace(one_pass.context, num_splits=case.num_splits)
    given = {
        name: value.to(device, case.dtype) if name == "sinks" else value
        for name, value in options.items()
    }
    found = one_pass.attend(1, query, *new, **given)
    if "sinks" in given:
        options["sinks"] = given["sinks"].cpu()
    parts = query[0].cpu().split(counts, dim=1)
    wanted = [
        expected_rows(row, q, k.cpu(), v.cpu(), options)
        for row, q, (k, v) in zip(rows, parts, whole)
    ]
    return found[0].cpu(), torch.cat(wanted)


# Of the kernel: every row of `ROWS` meets two of them.
VARIANTS = [
    (Case(6, 2, impl="triton"), {"sliding_window": 3, "softcap": 1.0}),
    (Case(4, 4, impl="triton", num_splits=1), {"sinks": True}),
    (Case(6, 2, impl="triton", num_splits=3), {"sliding_window": 7, "sinks": True}),
    (Case(4, 4, impl="triton", num_splits=4), {"softcap": 2.0}),
    (Case(6, 2, impl="triton", num_splits=1), {"sliding_window": Chunk(10)}),
    (Case(4, 4, impl="triton", num_splits=3), {"sliding_window": Chunk(3), "softcap": 1.0}),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_node_attends_along_its_own_path(options: dict) -> None:
    for rows, heads in zip(ROWS, itertools.cycle([(4, 4), (6, 2)])):
        found, expected = run_rows(rows, options, Case(*heads), CPU)
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
    found, expected = run_rows(
        rows, {} if window is None else {"sliding_window": window}, Case(), CPU
    )
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-4)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("index, rows", enumerate([*ROWS, *PLAIN]))
@pytest.mark.parametrize("half", [0, 1])
def test_the_kernel_equals_the_reference(
    index: int, rows: list[Row], half: int, device: torch.device
) -> None:
    case, options = VARIANTS[(index + 3 * half) % len(VARIANTS)]
    found, expected = run_rows(rows, options, case, device)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "rows, impl, spoiled",
    [
        *zip([*ROWS, *PLAIN], itertools.repeat("torch"), itertools.cycle([(2, 3), (5,), (1,)])),
        *zip([*ROWS, *PLAIN], itertools.repeat("triton"), itertools.cycle([(1,), (2, 3), (5,)])),
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
    "options",
    [
        {},
        {"sliding_window": 1000},
        {"sliding_window": Chunk(1024)},
        {"softcap": 30.0},
        {"sinks": True},
    ],
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
        .attend(0, query, key, value, scaling=0.1)
        .clone()
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = PagedPass(pool, tables, positions, lengths).attend(
            0, query, key, value, scaling=0.1
        )
    graph.replay()
    assert torch.equal(captured, eager)
    # Other numbers at the same addresses.
    positions += 1
    graph.replay()
    assert torch.equal(
        captured,
        PagedPass(pool, tables, positions, lengths).attend(0, query, key, value, scaling=0.1),
    )


def test_the_reference_is_taken_for_float64_and_on_the_cpu() -> None:
    for dtype in (torch.float32, torch.float64):
        pool = PagedPool.empty(
            num_layers=1, num_blocks=2, block_size=4, num_kv_heads=1, key_dim=4, dtype=dtype
        )
        one = PagedPass(pool, torch.tensor([[1]]), torch.tensor([0]), torch.tensor([1]))
        assert isinstance(one.context, GatheredContext)


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
    pool.move(table, sources, places)
    slot = {
        place: int(pool.slots_of(table[None], 0, torch.tensor([place]))[0]) for place in range(12)
    }
    assert (slot[0], slot[5], slot[10]) == (16, 5, 14)
    for old, new in zip(before, (*pool.keys, *pool.values)):
        wanted = old.clone()
        for source, place in zip(sources.tolist(), places.tolist()):
            wanted[slot[place]] = old[slot[source]]
        assert torch.equal(new, wanted)
