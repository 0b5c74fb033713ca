"""A token of each row and the distribution that it was drawn from. N rows, V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftsmith.kernels.sampling.draw_compiled import draw_compiled
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose, sample


class Drawn(NamedTuple):
    tokens: torch.Tensor  # [N] int64; -1 for a row without mass
    logits: torch.Tensor  # [N, V] float32, processed


def draw(
    logits: torch.Tensor,
    rows: SamplingRows,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
) -> Drawn:
    """`process` of raw logits [N, V], then `sample` by seeds and positions [N]."""
    found = draw_compiled(logits, rows, seeds, positions, int(purpose))
    return draw_torch(logits, rows, seeds, positions, purpose) if found is None else Drawn(*found)


def draw_torch(
    logits: torch.Tensor,
    rows: SamplingRows,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
) -> Drawn:
    """The reference."""
    processed = process(logits, rows)
    return Drawn(sample(processed, seeds, positions, purpose), processed)
