"""The text of a training pass, offline and online: which tokens there are, and how much each of them counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class WeightedText:
    """Teacher-forced text, right padded. B rows of L tokens."""

    input_ids: torch.Tensor  # [B, L] int64
    attention_mask: torch.Tensor  # [B, L] 1 for real tokens
    weights: torch.Tensor  # [B, L] float32, how much the draft of the token at j counts; 0 is not trained
    segments: torch.Tensor | None = None  # [B, L] int64, several texts a row: see drafters/target/segments.py
    places: torch.Tensor | None = (
        None  # [B, L] int64, number of each token among all of a data folder; -1, or None: it is in none
    )
