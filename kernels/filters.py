"""The sampling law of a request: temperature, then top-k, top-p and min-p, in transformers' order (sequential).

Placeholder of the data type only; the functions follow in this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of N rows. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch their filter off."""

    temperature: torch.Tensor  # [N] float32
    top_k: torch.Tensor  # [N] int64
    top_p: torch.Tensor  # [N] float32
    min_p: torch.Tensor  # [N] float32

    def select(self, rows: torch.Tensor) -> SamplingRows:
        return SamplingRows(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])
