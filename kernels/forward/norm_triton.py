"""RMS norms in Triton, alone or with the residual sum that they read.

Program r: row r, held in registers whole. Legend: H width of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device


class Norm(NamedTuple):
    """Numbers of an RMS norm beside its weight. `wide`: the weight, with `offset` added, multiplies
    in float32, before the result is rounded; else after that."""

    eps: float
    offset: float = 0.0
    wide: bool = False


@triton.jit
def weighted(
    normed, weight, at, inside, dtype: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr
):
    """float32 `normed` times the numbers `at` of `weight`, rounded to `dtype`, as float32."""
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if WIDE:
        return (normed * (factor + OFFSET)).to(dtype).to(tl.float32)
    return (normed.to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32)


@triton.jit
def _normalise(
    x,
    residual,  # [rows, H]
    weight,  # [H]
    total,  # [rows, H], written: x + residual
    out,  # [rows, H], written
    token_stride,  # of x
    head_stride,
    eps,
    HEADS: tl.constexpr,  # rows of a token
    WIDTH: tl.constexpr,  # H
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype = out.dtype.element_ty
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    begin = row // HEADS * token_stride + row % HEADS * head_stride
    numbers = tl.load(x + begin + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        rounded = (numbers + added).to(dtype)
        tl.store(total + row * WIDTH + at, rounded, mask=inside)
        numbers = rounded.to(tl.float32)
    normed = numbers * tl.rsqrt(tl.sum(numbers * numbers, axis=0) / WIDTH + eps)
    if HAS_WEIGHT:
        normed = weighted(normed, weight, at, inside, dtype, OFFSET, WIDE)
    tl.store(out + row * WIDTH + at, normed.to(dtype), mask=inside)


def normalise(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
) -> torch.Tensor:
    """x / sqrt(mean(x ** 2, -1) + eps), in float32, times `weight` [H]; x [..., H] of any strides.
    See `Norm`."""
    if not _in_rows(x):
        x = x.contiguous()
    return _launch(x, None, weight, Norm(eps, offset, wide))[1]


def add_normalise(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + residual, and `normalise` of it; both [..., H]."""
    return _launch(x.contiguous(), residual.contiguous(), weight, Norm(eps, offset, wide))


def _in_rows(x: torch.Tensor) -> bool:
    """True where the kernel reaches the rows of `x` by two strides."""
    return x.is_contiguous() or (x.ndim in (3, 4) and len(x) == 1 and x.stride(-1) == 1)


@on_its_device
def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    num_rows = x.numel() // width
    heads, strides = 1, (width, 0)
    if not x.is_contiguous():
        heads = 1 if x.ndim == 3 else x.shape[2]
        strides = (x.stride(1), x.stride(2) if x.ndim == 4 else 0)
    out = x.new_empty(x.shape)
    total = out if residual is None else x.new_empty(x.shape)
    if num_rows == 0:
        return total, out
    _normalise[(num_rows,)](
        x,
        # Unused pointers of a variant get any tensor.
        x if residual is None else residual,
        x if weight is None else weight,
        total,
        out,
        *strides,
        norm.eps,
        HEADS=heads,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        **norm_constants(norm),
        **sizes(width),
    )
    return total, out


def norm_constants(norm: Norm) -> dict[str, Any]:
    return {"OFFSET": norm.offset, "WIDE": norm.wide}


def sizes(width: int) -> dict[str, Any]:
    """Constants of rows of `width` numbers. A thread has eight of them, 16 bytes in half precision,
    as long as a program can have so many threads."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(32, max(1, block // 256))}
