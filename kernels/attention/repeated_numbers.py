"""Small tensors of numbers that are the same in most passes, such as the lengths of rows that read
one token each: made once, as making one takes as long as a small operation."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def repeated_numbers(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[n] int64; nothing may write into it."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)
