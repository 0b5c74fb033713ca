"""Results of verification. B rows, K drafted tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    accepted: torch.Tensor  # [B] int64, how many drafted tokens were kept
    tokens: torch.Tensor  # [B, K + 1] int64: the kept drafts, the residual or bonus token, then -1


class TreeVerdict(NamedTuple):
    accepted: torch.Tensor  # [B] int64, how many drafted tokens were kept
    tokens: torch.Tensor  # [B, N + 1] int64: the kept drafts, the residual or bonus token, then -1
    nodes: torch.Tensor  # [B, N] int64: the kept nodes in order, then -1
