"""Products of one or two bfloat16 rows with weights kept as float16.

FBGEMM reads float16 weights nearly as fast as the memory allows, oneDNN reads bfloat16 ones at half
of that (`scripts/bench_step`). With more rows arithmetic counts, and oneDNN is ahead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

MOST_ROWS = 2
# float16 holds any bfloat16 number from 2**-17 to 65504 exactly; smaller ones are off by at most
# 2**-25.
LARGEST, SMALLEST_ERROR = 65504.0, 2.0**-25
# Largest error of a weight against the root mean square of its row. Rounding a product to bfloat16
# costs up to 2**-9 of it.
TOLERANCE = 2.0**-12


class HalfLinear:
    """One float16 copy of a weight [out, in]; made by `half_linear`."""

    def __init__(self, packed: Any):
        self._packed = packed

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] bfloat16 -> [..., out] bfloat16; sums are float32, rounded once."""
        return torch.ops.quantized.linear_dynamic_fp16(rows.float(), self._packed).to(rows.dtype)


def half_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> HalfLinear | None:
    """`weight` [out, in] and `bias` [out] as float16, or None where that is not possible: another
    dtype than bfloat16, numbers that float16 cannot hold, a torch without FBGEMM."""
    if weight.dtype != torch.bfloat16 or not available() or not fits(weight):
        return None
    return HalfLinear(_pack(weight.float(), None if bias is None else bias.float()))


@cache
def available() -> bool:
    try:
        torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 8), _pack(torch.ones(8, 8), None))
    except (AttributeError, RuntimeError):
        return False
    return True


def fits(weight: torch.Tensor) -> bool:
    size = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32) / weight.shape[1] ** 0.5
    low, high = weight.aminmax()
    if not (low.item() >= -LARGEST and high.item() <= LARGEST):  # NaN neither
        return False
    exact = weight[size < SMALLEST_ERROR / TOLERANCE].float()
    error = (exact.half().float() - exact).abs().amax(dim=1)
    return bool((error <= TOLERANCE * exact.square().mean(dim=1).sqrt()).all())


def _pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)
