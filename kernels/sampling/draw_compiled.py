"""Draws from raw logits by a compiled kernel, for a CPU with a C++ compiler: the tokens and the
distributions of `draw`'s reference, in one call in place of dozens of operations."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from draftsmith.kernels.host_compiler import compiled
from draftsmith.kernels.sampling.filters import SamplingRows

SOURCE = Path(__file__).with_name("draw_cpu.cpp")
_pointer, _number = ctypes.c_void_p, ctypes.c_int64
ROWS: list[Any] = [
    _pointer,
    _number,
    _pointer,
    _pointer,
    _pointer,
    _pointer,
]  # `rows_of`'s arguments
ARGUMENTS = [*ROWS, _pointer, _pointer, _number, _pointer, _pointer, _number, _number]
ARGUMENTS += [ctypes.c_int]


@cache
def draw_kernel() -> Any:
    library = compiled(SOURCE)
    if library is None:
        return None
    library.draw.argtypes, library.draw.restype = ARGUMENTS, ctypes.c_bool
    return library.draw


def takes(logits: torch.Tensor) -> bool:
    """True for logits [..., V] that the kernels read."""
    return (
        logits.device.type == "cpu"
        and logits.dtype == torch.float32
        and logits.stride(-1) == 1
        and logits.numel() > 0
        and not logits.requires_grad
    )


def rows_of(logits: torch.Tensor, rows: SamplingRows) -> tuple[int, ...]:
    """Addresses of logits [N, V] and their options, which the caller keeps alive."""
    return (
        logits.data_ptr(),
        logits.stride(0),
        rows.temperature.data_ptr(),
        rows.top_k.data_ptr(),
        rows.top_p.data_ptr(),
        rows.min_p.data_ptr(),
    )


def draw_compiled(
    logits: torch.Tensor,
    rows: SamplingRows,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `draw`; None where a rounding of torch's might decide, and where there is no compiler."""
    kernel = draw_kernel() if takes(logits) else None
    if kernel is None:
        return None
    seeds, positions = seeds.contiguous(), positions.contiguous()
    num_rows, num_tokens = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    processed = torch.empty(logits.shape, dtype=torch.float32)
    done = kernel(
        *rows_of(logits, rows),
        seeds.data_ptr(),
        positions.data_ptr(),
        purpose,
        processed.data_ptr(),
        tokens.data_ptr(),
        num_rows,
        num_tokens,
        torch.get_num_threads(),
    )
    return (tokens, processed) if done else None
