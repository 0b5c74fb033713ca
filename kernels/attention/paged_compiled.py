"""Attention over a paged pool by a compiled kernel, for a CPU with a C++ compiler: keys and values
are read where they lie. Scores of other kinds are torch's, as where there is no compiler, and long
rows are on a processor on which it attends to them faster.

Legend as in `paged.py`.
"""

from __future__ import annotations

import ctypes
import itertools
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from draftsmith.kernels.attention.paged_torch import GatheredContext
from draftsmith.kernels.attention.pool import Chunk, PassLayout, Scoring, size_of
from draftsmith.kernels.call_list import RowAddresses
from draftsmith.kernels.dispatch import side_by_side
from draftsmith.kernels.host_compiler import address_of, function_of
from draftsmith.kernels.measured import CHOICES, Choices, Way

SOURCE = Path(__file__).with_name("paged_cpu.cpp")
# Queries that share the keys of a head, of a row in which a token has the same bits as alone; of
# longer rows it may have others, as another way is faster there, where a processor multiplies no
# pairs of bfloat16.
MOST_QUERIES = 192
MOST_DIM = 256  # `kMostDim` of the source
LONG_ROWS = "kernel", "torch"  # ways to attend to them
TIMED = 512  # tokens of the long row by which the faster way is found


@cache
def kernel(dtype: torch.dtype) -> Any:
    """The compiled function for keys of that dtype; None where there is none."""
    return function_of(SOURCE, "attend", 7 * "p" + 13 * "n" + "fi", dtype, result="b")


class CompiledContext(GatheredContext):
    """As `GatheredContext`, whose results it shares up to rounding. A row's result does not depend
    on the other rows, nor a node's of a tree on those beside its path: it has the bits that it has
    in a chain. Without `choices` long rows are the kernel's."""

    def __init__(self, block_size: int, layout: PassLayout, choices: Choices | None = CHOICES):
        super().__init__(block_size, layout)
        self._choices, self._longest_row = choices, max(self._row_lengths, default=0)
        # Of a pass's own tensors nothing is copied.
        parts = layout.block_tables, layout.kv_indices, layout.lengths
        tables, kv_indices, self._lengths = (one.long().contiguous() for one in parts)
        begins = (0, *itertools.accumulate(self._row_lengths))
        held = tables, kv_indices, self._lengths, repeated_numbers(begins, tables.device)
        tree = (None, None) if layout.tree is None else layout.tree[1:]
        self._held = *held, *(None if one is None else one.contiguous() for one in tree)
        # Valid as long as this object.
        self.row_addresses = RowAddresses(
            *(address_of(one) or 0 for one in self._held),
            len(self._row_lengths),
            self._longest_row,
            tables.shape[1],
            block_size,
        )

    def takes(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: Scoring,
    ) -> bool:
        """True where `attend` writes the pass's own keys and values, if it is given them."""
        return (
            self._is_plain(query, keys, values, rule)
            and new[0].dtype == new[1].dtype == keys.dtype
            and not self._leaves_long_rows(query, values)
        )

    def _leaves_long_rows(self, query: torch.Tensor, values: torch.Tensor) -> bool:
        heads, (_, kv_heads, value_dim) = query.shape[1], values.shape
        if self._choices is None or self._longest_row * (heads // kv_heads) <= MOST_QUERIES:
            return False
        shape = query.dtype, heads, kv_heads, query.shape[3], value_dim
        return _long_rows_way(self._choices, *shape, torch.get_num_threads()) == "torch"

    def _is_plain(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: Scoring
    ) -> bool:
        return rule.has_plain_scores and _fits(query, keys, values)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: Scoring,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """As `GatheredContext.attend`. `new`, where `takes` says so: key and value [1, kv_heads, T,
        dim] of the pass, which are written first."""
        if new is None and not self._is_plain(query, keys, values, rule):
            return super().attend(query, keys, values, rule)
        rows, leaves = self.row_addresses, self._leaves_long_rows(query, values)
        query = side_by_side(query)
        _, heads, num_tokens, key_dim = query.shape
        _, kv_heads, value_dim = values.shape
        longest = MOST_QUERIES // (heads // kv_heads)  # tokens of a row
        out = query.new_empty((num_tokens, heads, value_dim))
        if leaves:
            lengths = self._lengths.masked_fill(self._lengths > longest, 0)
            rows = RowAddresses.from_buffer_copy(rows)
            rows.lengths = lengths.data_ptr()
        pointers, strides = (None, None), (0, 0, 0, 0)
        if new is not None:
            key, value = side_by_side(new[0]), side_by_side(new[1])
            pointers = key.data_ptr(), value.data_ptr()
            strides = key.stride(1), key.stride(2), value.stride(1), value.stride(2)
        done = kernel(query.dtype)(
            query.data_ptr(), *pointers, keys.data_ptr(), values.data_ptr(), out.data_ptr(),
            ctypes.byref(rows), longest, heads, kv_heads, key_dim, value_dim, query.stride(1),
            query.stride(2), *strides, size_of(rule.window), isinstance(rule.window, Chunk),
            rule.scaling, torch.get_num_threads(),
        )  # fmt: skip
        if not done:
            raise IndexError("a token of the pass lies behind the blocks of its row")
        for part in self._parts_of(rule.window, longest) if leaves else ():
            begin, count = part.run.begin, part.run.num_rows * part.run.length
            out[begin : begin + count] = self._attend_part(part, query, keys, values, rule)
        return out


@cache
def _long_rows_way(
    choices: Choices,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    num_threads: int,
) -> str:
    """The faster way to attend to long rows, "kernel" or "torch"."""

    def prepare() -> dict[str, Way]:
        tokens, size = torch.arange(TIMED), 16
        layout = PassLayout(tokens[None, : TIMED // size], tokens, torch.tensor([TIMED]), None)
        query = torch.randn(1, heads, TIMED, key_dim).to(dtype)
        keys, values = (torch.randn(TIMED, kv_heads, dim).to(dtype) for dim in (key_dim, value_dim))
        inputs = query, keys, values, Scoring(key_dim**-0.5)
        ways = CompiledContext(size, layout, None), GatheredContext(size, layout)
        return {name: partial(way.attend, *inputs) for name, way in zip(LONG_ROWS, ways)}

    shape = dtype, heads, kv_heads, key_dim, value_dim
    return choices.fastest("long rows", shape, LONG_ROWS, prepare, sources=[SOURCE])


def compiled_context(
    keys: torch.Tensor, block_size: int, layout: PassLayout
) -> CompiledContext | None:
    """As `paged.attention_context`; None where there is no kernel for the type of `keys`."""
    return None if kernel(keys.dtype) is None else CompiledContext(block_size, layout)


def _fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    return (
        keys.dtype == values.dtype == query.dtype
        and max(keys.shape[-1], values.shape[-1]) <= MOST_DIM
        and keys.is_contiguous()
        and values.is_contiguous()
        and not query.requires_grad
        and kernel(query.dtype) is not None
    )


@lru_cache(maxsize=64)
def repeated_numbers(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[n] int64; nothing may write into it."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)
