"""Gates of feed-forward layers in Triton: an activation times what it lets through.

Program (token, block): `_BLOCK` numbers of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_BLOCK = 1024
_HALF_ROOT = tl.constexpr(0.7071067811865476)  # 1 / sqrt(2)
_SLOPE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
_CUBE = tl.constexpr(0.044715)


@triton.jit
def _gate(
    x,
    factor,
    out,  # [T, WIDTH], written
    x_stride,  # of a token
    factor_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dtype = out.dtype.element_ty
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    numbers = tl.load(x + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(factor + token * factor_stride + at, mask=inside, other=0.0)
    if ACTIVATION == "silu":
        opened = numbers * tl.sigmoid(numbers)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 u), which loses no digits where tanh(u) is near -1.
        inner = numbers + numbers * numbers * numbers * _CUBE
        opened = numbers * tl.sigmoid(inner * _SLOPE)
    else:
        opened = numbers * 0.5 * (1.0 + tl.erf(numbers * _HALF_ROOT))
    opened = opened.to(dtype).to(tl.float32)
    tl.store(out + token * WIDTH + at, (opened * factors.to(tl.float32)).to(dtype), mask=inside)


@on_its_device
def gate(x: torch.Tensor, factor: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(x) * factor, both [1, T, H]; one of `ACTIVATIONS`."""
    x, factor = (one if one.stride(2) == 1 else one.contiguous() for one in (x, factor))
    _, tokens, width = x.shape
    out = x.new_empty((1, tokens, width))
    if out.numel() == 0:
        return out
    _gate[(tokens, triton.cdiv(width, _BLOCK))](
        x,
        factor,
        out,
        x.stride(1),
        factor.stride(1),
        WIDTH=width,
        BLOCK=_BLOCK,
        ACTIVATION=activation,
    )
    return out
