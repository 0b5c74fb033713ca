"""Trees over the paged pool against float64 attention along each node's own path, and moving what was kept."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.paged_attention import PagedPass, PagedPool, TreeLayout

BLOCK, KEY_DIM, VALUE_DIM = 4, 8, 6
# Each row: committed places before the pass, then parents of the pass's tokens among them (-1: the newest committed token).
# The newest committed token itself goes first; None is a row without a tree of so many tokens.
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
    """`begin` places are cached; the pass brings `known` tokens, then a tree under the last of them."""

    def __init__(self, begin: int, known: int, parents: list[int]):
        self.begin, self.known, self.parents = begin, known, parents
        self.first = begin + known - 1
        bits = bits_of(parents)
        self.positions = list(range(begin, begin + known)) + [self.first + bin(b).count("1") - 1 for b in bits]
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


def expected_rows(row: Row, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict) -> torch.Tensor:
    """One token after another along its path: [heads, t, dim] x [n, kv_heads, dim] -> [t, heads, dim], float64."""
    groups = query.shape[0] // keys.shape[1]
    outs = []
    for index in range(query.shape[1]):
        path = row.path(index)[-(options.get("sliding_window") or 10_000) :]
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
OPTIONS = [
    {}, {"sliding_window": 3}, {"sliding_window": 7, "softcap": 1.0}, {"softcap": 2.0}, {"sinks": True},
]  # fmt: skip


def run_rows(rows: list[Row], options: dict, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, expected), both [T, heads, VALUE_DIM]; all slots that nobody wrote are NaN."""
    generator = torch.Generator().manual_seed(0)
    options = {"scaling": 0.3, **options}
    if options.get("sinks"):
        options["sinks"] = torch.randn(heads, generator=generator)
    width = -(-max(row.places[-1] + 1 for row in rows) // BLOCK)
    tables = torch.arange(1, len(rows) * width + 1).view(len(rows), width)
    tables[::2] = tables[::2].flip(1)
    pool = PagedPool.empty(
        num_layers=2, num_blocks=tables.numel() + 1, block_size=BLOCK, num_kv_heads=kv_heads, key_dim=KEY_DIM, value_dim=VALUE_DIM
    )
    for tensor in (*pool.keys, *pool.values):
        tensor[BLOCK:] = torch.nan
    whole = []
    for index, row in enumerate(rows):
        keys, values = (torch.randn(row.places[-1] + 1, kv_heads, dim, generator=generator) for dim in (KEY_DIM, VALUE_DIM))
        slots = pool.slots_of(tables, index, torch.arange(row.begin))
        pool.keys[1][slots], pool.values[1][slots] = keys[: row.begin], values[: row.begin]
        whole.append((keys, values))
    lengths = torch.tensor([len(row.places) for row in rows])
    query = torch.randn(1, heads, int(lengths.sum()), KEY_DIM, generator=generator)
    new = [torch.cat([pair[i][row.begin :] for row, pair in zip(rows, whole)]).transpose(0, 1)[None] for i in (0, 1)]
    layout = TreeLayout(
        places=torch.tensor([place for row in rows for place in row.places]),
        ancestors=torch.tensor([bits for row in rows for bits in row.ancestors]),
        first=torch.repeat_interleave(torch.tensor([row.first for row in rows]), lengths),
    )
    positions = torch.tensor([position for row in rows for position in row.positions])
    found = PagedPass(pool, tables, positions, lengths, tree=layout).attend(1, query, *new, **options)
    parts = query[0].split(lengths.tolist(), dim=1)
    return found[0], torch.cat([expected_rows(row, q, *pair, options) for row, q, pair in zip(rows, parts, whole)])


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rows", ROWS)
def test_a_node_attends_along_its_own_path(rows: list[Row], options: dict, heads: int, kv_heads: int) -> None:
    found, expected = run_rows(rows, options, heads, kv_heads)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-4)


def test_a_sibling_would_be_seen_without_the_bits() -> None:
    """The control of the test above: with plain causal masks the star's nodes differ."""
    row = Row(4, 1, STAR)
    row.ancestors = [-1] * len(row.places)
    found, expected = run_rows([row], {}, 4, 2)
    torch.testing.assert_close(found[:2].double(), expected[:2], atol=2e-6, rtol=1e-4)
    assert ((found[2:].double() - expected[2:]).abs().amax(dim=(1, 2)) > 1e-2).all()


def test_kept_nodes_move_to_consecutive_places() -> None:
    pool = PagedPool.empty(num_layers=2, num_blocks=6, block_size=BLOCK, num_kv_heads=2, key_dim=3, value_dim=5)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in (*pool.keys, *pool.values)]
    table = torch.tensor([4, 1, 3])
    # Places 6 and 7 are read by one and written by another.
    sources, places = torch.tensor([6, 7, 10]), torch.tensor([5, 6, 7])
    pool.move(table, sources, places)
    slot = {place: int(pool.slots_of(table[None], 0, torch.tensor([place]))[0]) for place in range(12)}
    assert (slot[0], slot[5], slot[10]) == (16, 5, 14)
    for old, new in zip(before, (*pool.keys, *pool.values)):
        wanted = old.clone()
        for source, place in zip(sources.tolist(), places.tolist()):
            wanted[slot[place]] = old[slot[source]]
        assert torch.equal(new, wanted)
