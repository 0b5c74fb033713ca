"""A target that is a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TableTarget:
    """p depends on the last token alone: `logits[v]` follow token v."""

    name, device, max_positions = "table", torch.device("cpu"), 4096

    def __init__(self, logits: torch.Tensor):
        self.logits, self.vocab_size = logits, len(logits)  # [V, V]

    def states(
        self, ids: torch.Tensor, mask: torch.Tensor, taps: Sequence[int]
    ) -> tuple[None, torch.Tensor]:
        return None, self.logits[ids]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden
