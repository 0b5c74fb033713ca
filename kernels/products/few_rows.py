"""Products of a few rows with a linear layer's weights, by a compiled kernel, for a CPU with a C++
compiler. Decoding and verification multiply so few rows that they wait for the weights: these are
laid out anew and read once, in the order of memory, whatever the number of rows.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.kernels.host_compiler import compiled
from draftsmith.kernels.huge_pages import empty_in_huge_pages

SOURCE = Path(__file__).with_name("few_rows_cpu.cpp")
# Rows of one product, of both kinds of weights. With more, oneDNN is as fast or faster.
MOST_ROWS = 64
# dtype -> its name in the source, and the numbers of which the width is a multiple.
KINDS = {torch.float32: ("float32", 1), torch.bfloat16: ("bfloat16", 2)}
_NARROW = 16  # outputs of which there is room for a multiple: `kNarrow` of the source

_pointer, _number = ctypes.c_void_p, ctypes.c_int64


class _Kernel(NamedTuple):
    multiply: Any
    lay_out: Any


@cache
def _kernel(dtype: torch.dtype, gated: bool = False) -> _Kernel | None:
    library = compiled(SOURCE) if dtype in KINDS else None
    if library is None:
        return None
    name = ("gated_" if gated else "") + KINDS[dtype][0]
    found = _Kernel(getattr(library, f"multiply_{name}"), getattr(library, f"lay_out_{name}"))
    found.multiply.argtypes = [_pointer] * 4 + [_number] * 3 + [ctypes.c_int]
    found.lay_out.argtypes = [_pointer] * 2 + [_number] * 2 + [ctypes.c_int]
    found.multiply.restype = found.lay_out.restype = None
    return found


class FewRows:
    """One copy of a weight `[out, in]`; made by `few_rows`. A row's product does not depend on the
    other rows, nor on their number. `gated`: as `gated_rows` has it."""

    def __init__(
        self,
        kernel: _Kernel,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gated: bool = False,
    ):
        halves = 2 if gated else 1
        self.num_outputs, self.width = len(weight) // halves, weight.shape[1]
        self.function, self._bias = kernel.multiply, bias
        room = -(-self.num_outputs // _NARROW) * _NARROW * halves
        self._weight = empty_in_huge_pages(room * self.width, weight.dtype)
        # of weights and bias
        self.pointers = (self._weight.data_ptr(), None if bias is None else bias.data_ptr())
        kernel.lay_out(
            weight.data_ptr(),
            self._weight.data_ptr(),
            self.width,
            self.num_outputs,
            torch.get_num_threads(),
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] of at most `MOST_ROWS` rows -> [..., out], sums in float32, rounded once.
        Raises `ValueError` for more rows, another width or another dtype than the weight's."""
        count = rows.numel() // self.width
        if count > MOST_ROWS or rows.shape[-1] != self.width or rows.dtype != self._weight.dtype:
            raise ValueError(
                f"rows are {list(rows.shape)} of {rows.dtype}; give at most {MOST_ROWS} of width "
                f"{self.width} in {self._weight.dtype}"
            )
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], self.num_outputs)
        self.function(
            rows.data_ptr(),
            *self.pointers,
            out.data_ptr(),
            count,
            self.width,
            self.num_outputs,
            torch.get_num_threads(),
        )
        return out


def few_rows(weight: torch.Tensor, bias: torch.Tensor | None) -> FewRows | None:
    """`weight` [out, in] and `bias` [out] laid out for a few rows; None where that is not possible:
    no C++ compiler, another dtype than float32 and bfloat16, an odd width in bfloat16."""
    return _made(weight, bias, gated=False)


def gated_rows(weight: torch.Tensor, bias: torch.Tensor | None) -> FewRows | None:
    """silu(x) * y of a few rows, where x are the products with the first half of `weight`
    [2 * out, in] and y those with the second, both rounded to the dtype, as is silu(x). None as in
    `few_rows`."""
    return _made(weight, bias, gated=True)


def _made(weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> FewRows | None:
    kernel = _kernel(weight.dtype, gated)
    if kernel is None or weight.shape[1] % KINDS[weight.dtype][1]:
        return None
    bias = None if bias is None else bias.to(weight.dtype).contiguous()
    return FewRows(kernel, weight.contiguous(), bias, gated=gated)
