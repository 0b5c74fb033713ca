"""Products with weights of 8 bits on a CPU with a C++ compiler: a code of -127 to 127 for each
weight, and one float32 scale for each output.

Decoding and verification wait for the weights, of which codes are half as many bytes as bfloat16. A
few rows are a compiled kernel's, which makes numbers of the codes in registers; for more rows they
may be made once, for oneDNN, where that is faster. Sums are of states times codes, which both types
of states hold exactly, and are scaled afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.kernels.host_compiler import HEADER, function_of
from draftsmith.kernels.host_memory import empty_in_huge_pages
from draftsmith.kernels.measured import CHOICES, Choices, Way
from draftsmith.kernels.products.few_rows import (
    LAY_OUT,
    MOST_ROWS,
    MULTIPLY,
    CompiledRows,
    multiply_any,
)
from draftsmith.kernels.products.readings import ReadWeights, fastest_readings

SOURCE = Path(__file__).with_name("int8_rows_cpu.cpp")
KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
LARGEST = 127  # code
STEP = 4  # the width is a multiple of it
OPENED, KERNEL = "torch, of opened codes", "int8_rows"
# Rows for which these are timed, and multiplications of each call.
_TIMED_ROWS, _TIMED_SIZE = 256, 1 << 25
_GROUP = 48  # outputs whose codes lie together: `kGroup` of the source


class _Kernel(NamedTuple):
    multiply: Any
    lay_out: Any
    open: Any


@cache
def _kernel(dtype: torch.dtype) -> _Kernel | None:
    if dtype not in KINDS:
        return None
    arguments = _Kernel(MULTIPLY, LAY_OUT, LAY_OUT)._asdict()
    found = [function_of(SOURCE, f"{name}_{KINDS[dtype]}", of) for name, of in arguments.items()]
    return None if None in found else _Kernel(*found)


def available() -> bool:
    """True where the kernel can be compiled."""
    return _kernel(torch.float32) is not None


class Int8Weight(NamedTuple):
    """A linear layer's weight [out, in] as codes, laid out for states of one type."""

    codes: torch.Tensor  # [groups * 48 * in] uint8, in an order that depends on the processor
    scales: torch.Tensor  # [out] float32


def quantised(weight: torch.Tensor, dtype: torch.dtype) -> Int8Weight:
    """`weight` [out, in], of which each output is divided by the 127th part of its largest
    magnitude and rounded to nearest; for states of `dtype`. Raises `ValueError` for a width that is
    no multiple of 4, and where `available` is False."""
    outputs, width = weight.shape
    kernel = _kernel(dtype)
    if kernel is None or width % STEP:
        raise ValueError(f"weights [{outputs}, {width}] are not multiplied as int8 in {dtype}")
    wide = weight.detach().float()
    scales = wide.abs().amax(dim=1) / LARGEST
    # An output of zeros has any scale.
    steps = torch.where(scales > 0, scales, 1.0)
    plain = (wide / steps[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    codes = empty_in_huge_pages(-(-outputs // _GROUP) * _GROUP * width, torch.uint8)
    threads = torch.get_num_threads()
    kernel.lay_out(plain.data_ptr(), codes.data_ptr(), width, outputs, threads)
    return Int8Weight(codes, scales)


def opened(weight: Int8Weight, dtype: torch.dtype) -> torch.Tensor:
    """Codes [out, in] as numbers of `dtype`, the type that they were laid out for."""
    outputs = len(weight.scales)
    width = len(weight.codes) // (-(-outputs // _GROUP) * _GROUP)
    out = torch.empty(outputs, width, dtype=dtype)
    kernel = _kernel(dtype)
    assert kernel is not None  # or there were no such weight
    kernel.open(weight.codes.data_ptr(), out.data_ptr(), width, outputs, torch.get_num_threads())
    return out


class Int8Rows(CompiledRows):
    """Products with several weights, all for states of `dtype` and of one width. Rows beyond a few
    may be torch's."""

    def __init__(
        self,
        weights: Sequence[Int8Weight],
        biases: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        *,
        pass_bytes: int = 0,
        choices: Choices = CHOICES,
    ):
        """`pass_bytes`: of all codes that a pass reads, where that is known."""
        kernel = _kernel(dtype)
        assert kernel is not None
        self.dtype, self.function, self._choices = dtype, kernel.multiply, choices
        self.sizes = [len(weight.scales) for weight in weights]
        self.width = len(weights[0].codes) // (-(-self.sizes[0] // _GROUP) * _GROUP)
        self._weights = list(weights)
        self._biases = [None if bias is None else bias.to(dtype).contiguous() for bias in biases]
        self.num_outputs = sum(self.sizes)
        begins = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        layers = [
            (*(tensor.data_ptr() for tensor in weight), 0 if bias is None else bias.data_ptr())
            for weight, bias in zip(self._weights, self._biases, strict=True)
        ]
        fields = [
            field
            for layer, begin, size in zip(layers, begins, self.sizes, strict=True)
            for field in (*layer, begin, size)
        ]
        # `Layers` of the source
        self._layers = torch.tensor([len(layers), *fields], dtype=torch.int64)
        self.pointers = (self._layers.data_ptr(), None)
        self.readings = _readings(dtype, self.width, self.num_outputs, pass_bytes, choices)

    def __call__(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """[..., in] -> [..., out_i] of every weight."""
        self.check(rows)
        count = rows.numel() // self.width
        if count > MOST_ROWS and self.way() == OPENED:
            return [_many(rows, *layer) for layer in zip(self._weights, self._biases, strict=True)]
        joined = self.first(rows, self.num_outputs)
        return (joined,) if len(self.sizes) == 1 else torch.split_with_sizes(joined, self.sizes, -1)

    def way(self) -> str:
        """Way to multiply more rows than few."""
        outputs = min(self.num_outputs, max(_TIMED_SIZE // (_TIMED_ROWS * self.width), 1))
        return _way(self.dtype, self.width, outputs, self._choices)


@cache
def _way(dtype: torch.dtype, width: int, outputs: int, choices: Choices) -> str:
    def prepare() -> Mapping[str, Way]:
        weight = quantised(torch.ones(outputs, width), dtype)
        rows, own = torch.ones(_TIMED_ROWS, width, dtype=dtype), Int8Rows([weight], [None], dtype)
        return {OPENED: lambda: _many(rows, weight, None), KERNEL: lambda: own.first(rows, outputs)}

    shape = (dtype, f"{width} wide", f"{outputs} outputs", f"{_TIMED_ROWS} rows")
    names = (OPENED, KERNEL)
    return choices.fastest("int8 many rows", shape, names, prepare, sources=[SOURCE, HEADER])


def _many(rows: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    product = torch.nn.functional.linear(rows, opened(weight, rows.dtype))
    scaled = product.float().mul_(weight.scales)
    return (scaled if bias is None else scaled.add_(bias)).to(rows.dtype)


@cache
def _readings(
    dtype: torch.dtype, width: int, outputs: int, pass_bytes: int, choices: Choices
) -> int:
    weights = ReadWeights(
        "int8 rows", (dtype, f"{width} wide"), outputs, width, partial(_timed, dtype, width), SOURCE
    )
    return fastest_readings(weights, max(pass_bytes, outputs * width), choices)


def _timed(
    dtype: torch.dtype, width: int, count: int, codes: int, outputs: int, readings: int
) -> None:
    kernel = _kernel(dtype)
    assert kernel is not None
    scales = torch.ones(outputs)
    layers = torch.tensor([1, codes, scales.data_ptr(), 0, 0, outputs])
    multiply_any(kernel.multiply, dtype, width, count, layers.data_ptr(), outputs, readings)
