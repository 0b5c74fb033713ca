"""The pass that is running: its context and positions, for modules that their model does not hand
them to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch


class CurrentPass(NamedTuple):
    context: Any  # an `AttentionContext` of drafters/target/attention.py
    positions: torch.Tensor  # [1, T]

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads,
        value_dim]."""
        layer = module.layer_idx if hasattr(module, "layer_idx") else module.layer_id
        return self.context.attend(layer, query, key, value, **options).contiguous()


_current: ContextVar[CurrentPass | None] = ContextVar("current pass", default=None)


@contextmanager
def running(context: Any, positions: torch.Tensor) -> Iterator[None]:
    """Around a forward pass with a context."""
    token = _current.set(CurrentPass(context, positions))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> CurrentPass | None:
    """None in a pass without a context, in which a patched module runs its own code."""
    return _current.get()
