"""Attention of training passes on a CUDA device by torch's `flex_attention`, whose compiled kernel
skips tiles that no query sees and keeps no scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

# (row, head, query, key), tensors of indices -> True where the query sees the key.
Sees = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Variants by depth, window and shape; one more would run uncompiled, with all scores in memory.
RECOMPILES = 64


def can_flex(states: torch.Tensor) -> bool:
    return states.device.type == "cuda"


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo import config

    return config.patch(recompile_limit=RECOMPILES)(torch.compile(function))


def _fitting(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    return _compiled(function) if device.type == "cuda" else function


def block_mask(sees: Sees, rows: int | None, queries: torch.Tensor, keys: int) -> BlockMask:
    """Mask of all heads; of all rows alike where `rows` is None."""
    device = queries.device
    # Compiled, it keeps no entry for each pair.
    make = _fitting(create_block_mask, device)
    return make(sees, rows, None, queries.shape[2], keys, device=device)


def flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask
) -> torch.Tensor:
    """Scaled queries [B, heads, N, D] -> [B, heads, N, value dim]."""
    attend = _fitting(flex_attention, query.device)
    return attend(query, key, value, block_mask=mask, scale=1.0, enable_gqa=True)
