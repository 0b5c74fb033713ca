"""Products of narrow numbers by float32 arithmetic: many rows on a CPU without instructions for the
narrow type, which torch multiplies several times slower than float32."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from draftsmith.kernels.measured import CHOICES, Choices, Way

NARROW = (torch.bfloat16, torch.float16)
LEAST_ROWS = 17  # with fewer, widening the weights costs more than it spares
ROWS, WIDTH = 128, 1024  # of the product that is timed


def widened(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., in] by [out, in] -> [..., out]: sums in float32, rounded once."""
    wide = linear(rows.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(rows.dtype)


def widens(dtype: torch.dtype, choices: Choices = CHOICES) -> bool:
    """True where many rows of `dtype` are multiplied faster by `widened` than by torch, on a
    CPU."""
    if dtype not in NARROW:
        return False

    def ways() -> dict[str, Way]:
        rows, weight = (torch.full((count, WIDTH), 0.5, dtype=dtype) for count in (ROWS, WIDTH))
        return {"torch": lambda: linear(rows, weight), "float32": lambda: widened(rows, weight)}

    return choices.fastest("narrow products", (dtype,), ("torch", "float32"), ways) == "float32"
