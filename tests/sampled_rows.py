"""Rows of logits, parameters and random streams for tests of sampling kernels."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from draftsmith.kernels.sampling.filters import SamplingRows

options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 1.5, 100.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 20, 10**6]),
        "top_p": st.sampled_from([1.0, 1.0, 0.0, 1e-6, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
    }
)


def rows_of(values: list[dict[str, float]]) -> SamplingRows:
    columns = {name: [one[name] for one in values] for name in values[0]}
    return SamplingRows.of(columns.pop("temperature"), **columns)  # type: ignore[arg-type]


def logits_of(seed: int, rows: int, tokens: int, scale: float) -> torch.Tensor:
    """With many equal numbers in a third of the rows, and some that are not finite in another."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, tokens, generator=generator)
    logits[::3] = logits[::3].round()
    for value in (math.nan, math.inf, -math.inf):
        share = 0.3 if value == -math.inf else 0.02
        logits[1::3][torch.rand(logits[1::3].shape, generator=generator) < share] = value
    return logits


def streams(count: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    return seeds, torch.randint(0, 100_000, (count,), generator=generator)
