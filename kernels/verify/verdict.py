"""Drafted tokens of a round and what verification makes of them. B rows, K drafted tokens, V
vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Drafts(NamedTuple):
    """Drafted tokens of the first D of B rows."""

    tokens: torch.Tensor  # [D, K] int64
    lengths: torch.Tensor  # [D] int64
    logits: torch.Tensor | None  # [D, K, V] processed; None where drafting was deterministic
    # [D] int64, >= lengths: rows of target logits that each row owns beside its first one
    sizes: torch.Tensor

    def padded(self, num_rows: int) -> Drafts:
        """The same of all rows; those behind the first D have none."""
        missing = num_rows - len(self.tokens)
        if missing == 0:
            return self
        pad = torch.nn.functional.pad
        logits = self.logits
        if logits is not None:
            logits = pad(logits, (0, 0, 0, 0, 0, missing), value=-torch.inf)
        return Drafts(
            pad(self.tokens, (0, 0, 0, missing), value=-1),
            pad(self.lengths, (0, missing)),
            logits,
            pad(self.sizes, (0, missing)),
        )


class Verdict(NamedTuple):
    accepted: torch.Tensor  # [B] int64, how many drafted tokens were kept
    tokens: torch.Tensor  # [B, K + 1] int64: the kept drafts, the residual or bonus token, then -1


class TreeVerdict(NamedTuple):
    accepted: torch.Tensor  # [B] int64, how many drafted tokens were kept
    tokens: torch.Tensor  # [B, N + 1] int64: the kept drafts, the residual or bonus token, then -1
    nodes: torch.Tensor  # [B, N] int64: the kept nodes in order, then -1
