"""Rows of the paged pool, some of them with a tree, and attention of each token along its own path
in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import Chunk, PagedPool, Scoring, TreeLayout, Window

BLOCK, KEY_DIM, VALUE_DIM = 4, 8, 6


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
        path = visible_of(row.path(index), options.get("window"))
        k, v = (x[path].double().repeat_interleave(groups, 1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", query[:, index].double(), k) * options["scaling"]
        if options.get("softcap") is not None:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        if options.get("sinks") is not None:
            scores = torch.cat([scores, options["sinks"].double()[:, None]], -1)
        outs.append(torch.einsum("hn,nhd->hd", torch.softmax(scores, -1)[:, : len(path)], v))
    return torch.stack(outs)


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
        tickets = torch.zeros(1000, dtype=torch.int64, device=device)
        one_pass.context = replace(one_pass.context, num_splits=case.num_splits, tickets=tickets)
    given = {
        name: value.to(device, case.dtype) if name == "sinks" else value
        for name, value in options.items()
    }
    found = one_pass.attend(1, query, *new, Scoring(**given))
    assert torch.isnan(pool.keys[0][case.block :]).all(), "another layer was written"
    if "sinks" in given:
        options["sinks"] = given["sinks"].cpu()
    parts = query[0].cpu().split(counts, dim=1)
    wanted = [
        expected_rows(row, q, k.cpu(), v.cpu(), options)
        for row, q, (k, v) in zip(rows, parts, whole)
    ]
    return found[0].cpu(), torch.cat(wanted)
