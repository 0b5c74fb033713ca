"""Adjustments of target logits, for tests that have rows and drafted tokens as lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftsmith.serve.sampling.adjustments import Adjustments


def apply(
    adjust: Adjustments,
    logits: torch.Tensor,
    owners: Sequence[int],
    prefixes: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Row r of `logits` [R, V] is that of request `owners[r]` behind the drafted `prefixes[r]`."""
    width = max(map(len, prefixes), default=0)
    padded = [[*one, *[-1] * (width - len(one))] for one in prefixes]
    drafted = torch.tensor(padded, dtype=torch.int64).view(len(padded), width)
    rows = torch.tensor(list(owners), dtype=torch.int64)
    known = [list(one) for one in prefixes]
    device = logits.device
    return adjust.apply(logits, rows.to(device), drafted.to(device), owners, known)
