"""A token of each row, or several, and the distribution it was drawn from. N rows, V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import choose
from draftsmith.kernels.sampling.draw_compiled import draw_compiled
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
