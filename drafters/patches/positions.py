"""Modules that count the tokens of a pass for their positions: embeddings (BART and its kin), and
scales of queries (Llama 4)."""

from __future__ import annotations

import copy
from typing import Any

import torch

from draftsmith.drafters.patches.current import current


def counted(self: Any, *inputs: Any, **named: Any) -> torch.Tensor:
    """`forward` of such an embedding."""
    if (now := current()) is None:
        return type(self).forward(self, *inputs, **named)
    places = now.positions + getattr(self, "offset", 0)
    return torch.nn.functional.embedding(places, self.weight)


def tempered(self: Any, *inputs: Any, **named: Any) -> Any:
    """`forward` of Llama 4's attention, whose layers without rotation scale queries by position."""
    if (now := current()) is None or self.use_rope or not self.attn_temperature_tuning:
        return type(self).forward(self, *inputs, **named)
    unscaled = copy.copy(self)  # of the same weights
    unscaled.attn_temperature_tuning = False
    steps = torch.floor((now.positions.float() + 1.0) / self.floor_scale)
    scale = torch.log1p(steps) * self.attn_scale + 1.0
    # Reaches our attention function through the module's options.
    return type(self).forward(unscaled, *inputs, query_scale=scale[:, None, :, None], **named)
