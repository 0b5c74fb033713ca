"""Steps between the products of a layer, each one call of a compiled kernel, for a CPU with a C++
compiler: of a few rows, torch's several operations cost more to call than to compute. A row's
result does not depend on the other rows, nor on their number.

Each rounds to the dtype where the several operations do. Legend: T tokens, D width of a head.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from draftsmith.kernels.dispatch import side_by_side
from draftsmith.kernels.host_compiler import address_of, function_of

SOURCE = Path(__file__).with_name("row_steps_cpu.cpp")
_SIGNATURES = {
    "normalise": "pppnnffii",
    "rotate": "ppppnnnnni",
    "gate": "pppnnnni",
    "add": "pppnnnni",
}


class RowSteps:
    """Steps of one dtype; made by `row_steps`."""

    def __init__(self, functions: dict[str, Any]):
        self.functions = functions  # as `call_list` calls them
        self._normalise, self._rotate, self._gate, _ = (functions[name] for name in _SIGNATURES)

    def normalise(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        offset: float = 0.0,
        wide: bool = False,
    ) -> torch.Tensor:
        """x / sqrt(mean(x ** 2, -1) + eps), summed in float32, then times `weight` [H]; x [..., H].
        `wide`: the weight, with `offset` added, multiplies in float32, before the result is
        rounded; else after that."""
        x = x.contiguous()
        width = x.shape[-1]
        out = torch.empty_like(x)
        self._normalise(
            x.data_ptr(),
            address_of(weight),
            out.data_ptr(),
            x.numel() // width,
            width,
            eps,
            offset,
            wide,
            torch.get_num_threads(),
        )
        return out

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """x * cosine + cat(-x[D / 2 :], x[: D / 2]) * sine; x [1, heads, T, D], the others [1, 1,
        T, D]."""
        x = side_by_side(x)
        _, heads, tokens, dim = x.shape
        out = x.new_empty((1, tokens, heads, dim))
        # Copies have to live as long as the call.
        cosine, sine = cosine.contiguous(), sine.contiguous()
        self._rotate(
            x.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            out.data_ptr(),
            tokens,
            heads,
            dim,
            x.stride(2),
            x.stride(1),
            torch.get_num_threads(),
        )
        return out.transpose(1, 2)

    def gate(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """silu(x) * factor, both [1, T, H]."""
        x, factor = side_by_side(x), side_by_side(factor)
        _, tokens, width = x.shape
        out = x.new_empty((1, tokens, width))
        self._gate(
            x.data_ptr(),
            factor.data_ptr(),
            out.data_ptr(),
            tokens,
            width,
            x.stride(1),
            factor.stride(1),
            torch.get_num_threads(),
        )
        return out


@cache
def row_steps(dtype: torch.dtype) -> RowSteps | None:
    """None where that is not possible: no C++ compiler, another dtype than float32 and bfloat16."""
    found = {name: function_of(SOURCE, name, types, dtype) for name, types in _SIGNATURES.items()}
    return None if None in found.values() else RowSteps(found)
