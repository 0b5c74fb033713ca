"""A token of each row, or several, and the distribution it was drawn from; on a CPU by a compiled
kernel, in one call in place of dozens of operations. N rows, V vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.kernels.dispatch import operation, reads_freely
from draftsmith.kernels.host_compiler import function_of
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose, sample, sample_without_replacement


class Drawn(NamedTuple):
    tokens: torch.Tensor  # [N] int64; -1 for a row without mass
    logits: torch.Tensor  # [N, V] float32, processed


@operation
def draw(
    logits: torch.Tensor,
    rows: SamplingRows,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    *,
    impl: str = "auto",
) -> Drawn:
    """`process` of raw logits [N, V], then `sample` by seeds and positions [N]."""
    processed = process(logits, rows, impl="torch")
    return Drawn(sample(processed, seeds, positions, purpose), processed)


@operation
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
    return sample_without_replacement(processed, seeds, positions, purpose, count)


SOURCE = Path(__file__).with_name("draw_cpu.cpp")
ROWS = "pnpppp"  # `rows_of`'s arguments


def draw_kernel() -> Any:
    return function_of(SOURCE, "draw", ROWS + "ppnppnni", result="b")


def takes(logits: torch.Tensor) -> bool:
    """True for logits [..., V] that the kernels read."""
    return (
        reads_freely(logits.device)
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
    purpose: Purpose,
) -> Drawn | None:
    """As `draw`: rows on which a rounding of torch's might decide are torch's. None where all are,
    and where there is no compiler."""
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    kernel = draw_kernel() if takes(logits) else None
    if kernel is None:
        return None
    seeds, positions = seeds.contiguous(), positions.contiguous()
    num_rows, num_tokens = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    processed = torch.empty(logits.shape, dtype=torch.float32)
    streams = seeds.data_ptr(), positions.data_ptr(), int(purpose)
    found = processed.data_ptr(), tokens.data_ptr(), num_rows, num_tokens
    done = kernel(*rows_of(logits, rows), *streams, *found, torch.get_num_threads())
    if not done:
        left = (tokens < 0).nonzero()[:, 0]
        if len(left) == num_rows:
            return None
        own = logits[left], rows.select(left), seeds[left], positions[left]
        tokens[left], processed[left] = draw(*own, purpose, impl="torch")
    return Drawn(tokens, processed)
