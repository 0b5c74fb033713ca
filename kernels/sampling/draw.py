"""A token of each row, or several, and the distribution it was drawn from; on a CPU by a compiled
kernel, in one call in place of dozens of operations. N rows, V vocabulary."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.kernels.dispatch import choose
from draftsmith.kernels.host_compiler import compiled
from draftsmith.kernels.sampling.filters import SamplingRows, process_torch
from draftsmith.kernels.sampling.random_streams import (
    Purpose,
    first_arrivals,
    sample,
    sample_without_replacement,
)


class Drawn(NamedTuple):
    tokens: torch.Tensor  # [N] int64; -1 for a row without mass
    logits: torch.Tensor  # [N, V] float32, processed


def draw(
    logits: torch.Tensor,
    rows: SamplingRows,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    *,
    impl: str = "auto",
) -> Drawn:
    """`process` of raw logits [N, V], then `sample` by seeds and positions [N]. `impl` is "auto",
    "triton" or "torch"."""
    if choose(impl, logits.device, logits.dtype) == "triton":
        from draftsmith.kernels.sampling.draw_triton import draw_triton

        streams = (seeds, positions, int(purpose))
        kinds = {"greedy": rows.passes.greedy, "filtered": rows.passes.filtered}
        return Drawn(*draw_triton(logits, rows.options, streams, **kinds))
    found = None
    if impl == "auto":
        wide = logits.float() if logits.dtype == torch.bfloat16 else logits
        found = draw_compiled(wide, rows, seeds, positions, int(purpose))
    return draw_torch(logits, rows, seeds, positions, purpose) if found is None else Drawn(*found)


def draw_several(
    processed: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    count: int,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """`sample_without_replacement` of processed logits [N, V] -> ids [N, count] int64."""
    if choose(impl, processed.device, processed.dtype) == "triton":
        from draftsmith.kernels.sampling.draw_triton import scores_triton

        return first_arrivals(scores_triton(processed, (seeds, positions, int(purpose))), count)
    return sample_without_replacement(processed, seeds, positions, purpose, count)


def draw_torch(
    logits: torch.Tensor,
    rows: SamplingRows,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
) -> Drawn:
    """The reference."""
    processed = process_torch(logits, rows)
    return Drawn(sample(processed, seeds, positions, purpose), processed)


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
