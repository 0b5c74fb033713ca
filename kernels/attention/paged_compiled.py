"""Attention over a paged pool by a compiled kernel, for a CPU with a C++ compiler: short rows (one
token, a verification) read keys and values where they lie. All else is torch's, as where there is
no compiler.

Legend as in `paged.py`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from draftsmith.kernels.attention.paged_torch import GatheredContext
from draftsmith.kernels.attention.pool import TreeLayout
from draftsmith.kernels.attention.window import Chunk, Window, size_of
from draftsmith.kernels.host_compiler import compiled

SOURCE = Path(__file__).with_name("paged_cpu.cpp")
NAMES = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}
# Queries that share the keys of a head. torch is as fast from about 16 on; up to here a token has
# the same bits alone and in a verification.
MOST_QUERIES = 32
MOST_DIM = 256  # `kMostDim` of the source

_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = [_pointer] * 8 + [_number] * 12 + [ctypes.c_float, ctypes.c_int]


@cache
def kernel(dtype: torch.dtype) -> Any:
    """The compiled function for keys of that dtype; None where there is none."""
    library = compiled(SOURCE) if dtype in NAMES else None
    if library is None:
        return None
    function = getattr(library, NAMES[dtype])
    function.argtypes, function.restype = _ARGUMENTS, None
    return function


class CompiledContext(GatheredContext):
    """As `GatheredContext`, whose results it shares up to rounding. A row's result does not depend
    on the other rows."""

    def __init__(
        self,
        block_size: int,
        block_tables: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        tree: TreeLayout | None,
    ):
        super().__init__(block_size, block_tables, positions, lengths, tree)
        self._tables, self._ends, self._lengths = (
            tensor.long().contiguous() for tensor in (block_tables, positions, lengths)
        )
        self._begins = self._lengths.cumsum(0) - self._lengths

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        window: Window | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        plain = self.tree is None and softcap is None and sinks is None
        if not (plain and _fits(query, keys, values)):
            return super().attend(
                query,
                keys,
                values,
                scaling=scaling,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        if query.stride(3) != 1:
            query = query.contiguous()
        _, heads, num_tokens, key_dim = query.shape
        _, kv_heads, value_dim = values.shape
        longest = MOST_QUERIES // (heads // kv_heads)  # tokens of a row
        out = query.new_empty(num_tokens, heads, value_dim)
        kernel(query.dtype)(
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            self._tables.data_ptr(),
            self._ends.data_ptr(),
            self._lengths.data_ptr(),
            self._begins.data_ptr(),
            len(self._lengths),
            longest,
            self._tables.shape[1],
            self.block_size,
            heads,
            kv_heads,
            key_dim,
            value_dim,
            query.stride(1),
            query.stride(2),
            size_of(window),
            isinstance(window, Chunk),
            scaling,
            torch.get_num_threads(),
        )
        if max(self._row_lengths) > longest:
            for part in self._parts_of(window, longest):
                begin, count = part.run.begin, part.run.num_rows * part.run.length
                out[begin : begin + count] = self._attend_part(
                    part, query, keys, values, scaling, softcap, sinks
                )
        return out


def _fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    return (
        keys.dtype == values.dtype == query.dtype
        and max(keys.shape[-1], values.shape[-1]) <= MOST_DIM
        and keys.is_contiguous()
        and values.is_contiguous()
        and not query.requires_grad
        and kernel(query.dtype) is not None
    )
