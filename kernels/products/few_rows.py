"""Products of a few rows with a linear layer's weights, by a compiled kernel, for a CPU with a C++
compiler. Decoding and verification multiply so few rows that they wait for the weights: these are
laid out anew and read once, in the order of memory, whatever the number of rows. How they are asked
for early is measured (`readings`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.kernels.host_compiler import address_of, function_of
from draftsmith.kernels.host_memory import empty_in_huge_pages
from draftsmith.kernels.measured import CHOICES, Choices
from draftsmith.kernels.products.readings import ReadWeights, fastest_readings

SOURCE = Path(__file__).with_name("few_rows_cpu.cpp")
# Rows of one pass of kernels. With more, others may be faster.
MOST_ROWS = 64
# Numbers of which the width is a multiple.
STEPS = {torch.float32: 1, torch.bfloat16: 2}
_NARROW = 16  # outputs of which there is room for a multiple: at least a register


class _Kernel(NamedTuple):
    multiply: Any
    lay_out: Any


def _kernel(dtype: torch.dtype) -> _Kernel | None:
    multiply = function_of(SOURCE, "multiply", "ppppnnnni", dtype)
    lay_out = function_of(SOURCE, "lay_out", "ppnni", dtype)
    return None if multiply is None else _Kernel(multiply, lay_out)


class FewRows:
    """Products with one copy of a weight `[out, in]`; made by `few_rows`. A row's does not depend
    on the other rows, nor on their number. `readings`: as `readings.packed` gives them."""

    def __init__(
        self, kernel: _Kernel, weight: torch.Tensor, bias: torch.Tensor | None, *, readings: int
    ):
        self.readings, self.dtype = readings, weight.dtype
        self.num_outputs, self.width = weight.shape
        self.function, self._bias = kernel.multiply, bias  # as `call_list` calls it
        room = -(-self.num_outputs // _NARROW) * _NARROW
        self._weight = empty_in_huge_pages(room * self.width, weight.dtype)
        self.pointers = (self._weight.data_ptr(), address_of(bias))
        sizes = self.width, self.num_outputs, torch.get_num_threads()
        kernel.lay_out(weight.data_ptr(), self._weight.data_ptr(), *sizes)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]. Raises `ValueError` for another width or another dtype than the
        weights'."""
        if rows.shape[-1] != self.width or rows.dtype != self.dtype:
            raise ValueError(
                f"rows are {list(rows.shape)} of {rows.dtype}; give width {self.width} in "
                f"{self.dtype}"
            )
        return self.first(rows, self.num_outputs)

    def first(self, rows: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """[..., in] -> the first outputs [..., num_outputs], sums in float32, rounded once."""
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], num_outputs)
        sizes = rows.numel() // self.width, self.width, num_outputs
        pointers = rows.data_ptr(), *self.pointers, out.data_ptr()
        self.function(*pointers, *sizes, self.readings, torch.get_num_threads())
        return out


def few_rows(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    pass_bytes: int | None = None,
    choices: Choices = CHOICES,
) -> FewRows | None:
    """`weight` [out, in] and `bias` [out] laid out for a few rows; None where that is not possible:
    no C++ compiler, another dtype than float32 and bfloat16, an odd width in bfloat16.
    `pass_bytes`: of all weights that a pass reads, by default of this one alone."""
    (num_outputs, width), dtype = weight.shape, weight.dtype
    kernel = _kernel(dtype)
    if kernel is None or width % STEPS[dtype]:
        return None

    def multiply(count: int, weights: int, outputs: int, readings: int) -> None:
        ones, out = torch.ones(count, width, dtype=dtype), torch.empty(count, outputs, dtype=dtype)
        sizes = (count, width, outputs, readings, torch.get_num_threads())
        kernel.multiply(ones.data_ptr(), weights, None, out.data_ptr(), *sizes)

    weights = ReadWeights(
        (dtype, f"{width} wide"), num_outputs, width * dtype.itemsize, multiply, SOURCE
    )
    readings = fastest_readings(weights, max(pass_bytes or 0, weight.nbytes), choices)
    bias = None if bias is None else bias.to(dtype).contiguous()
    return FewRows(kernel, weight.contiguous(), bias, readings=readings)
