"""Sliding windows of a draft's layers: a token sees so many positions, its own among them.

In `config.json` they stand under the names of vLLM and of the speculators layout: `layer_types`
with "sliding_attention" for each layer that has one, and `sliding_window` for its width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.errors import UserError
from draftsmith.kernels.attention.pool import Window

SLIDING, FULL = "sliding_attention", "full_attention"
Windows = tuple[int | None, ...]  # of each layer; empty: none has one


def new_windows(window: int | None, num_layers: int) -> Windows:
    """The same window for all layers of a new draft."""
    return () if window is None else (window,) * num_layers


def windows_in(values: Mapping[str, Any]) -> Windows:
    """Windows that `config.json` values describe. `sliding_window` alone says nothing: configs have
    it beside layers that see everything."""
    count = values["num_hidden_layers"]
    types = list(values.get("layer_types") or ())[:count]
    if SLIDING not in types:
        return ()
    window = values.get("sliding_window")
    if not window or window < 1:
        raise UserError(
            f"a draft with sliding attention has sliding_window={window!r}; restore config.json"
        )
    types += [FULL] * (count - len(types))
    return tuple(window if kind == SLIDING else None for kind in types)


def windows_config(windows: Windows) -> dict[str, Any]:
    """The inverse."""
    if not windows:
        return {}
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": max(window or 0 for window in windows),
    }


class WindowedContext:
    """An `AttentionContext` that gives every layer its window, for modules that have none."""

    def __init__(self, context: AttentionContext, windows: Windows):
        self.context, self.windows = context, windows

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: Window | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.context.attend(
            layer, query, key, value,
            scaling=scaling, sliding_window=self.windows[layer], softcap=softcap, sinks=sinks,
        )  # fmt: skip
