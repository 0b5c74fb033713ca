"""Attention of a block whose layers do not all see alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftsmith.drafters.target.attention import AttentionContext


class LayerPasses:
    """An `AttentionContext`: of each layer, the pass that is causal or not as `is_causal` says."""

    def __init__(self, is_causal: Callable[[int], bool], make: Callable[[bool], AttentionContext]):
        self.is_causal, self.make = is_causal, make
        self.passes: dict[bool, AttentionContext] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        causal = self.is_causal(layer)
        if causal not in self.passes:
            self.passes[causal] = self.make(causal)
        return self.passes[causal].attend(layer, query, key, value, **options)
