"""Training-time attention of a block drafter: at every column of a text stands a block of slots, as it would when serving.

The block at column n sees the context keys of the columns before n and its own slots, if causal only those up to each.

Legend: B rows, L columns, S slots of a block, C columns of a chunk, G queries a key-value head, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint

# Columns whose blocks attend at once; they skip the context that none of them may see.
CHUNK = 64
# Longer texts recompute their attention weights in the backward pass.
LONG = 512


class BlockPass:
    """An `AttentionContext`. `keys` and `values`: of every layer, the context's [B, kv_heads, L, D]."""

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], *, slots: int, causal: bool):
        self.keys, self.values, self.slots, self.causal = keys, values, slots, causal

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of L * S slots, block after block."""
        if sliding_window is not None or softcap is not None or sinks is not None:
            raise ValueError("a block drafter with a sliding window, soft cap or sinks cannot be trained; use plain attention")
        # Under autocast the rotated queries and keys come wider than the values.
        context_value = self.values[layer].to(value.dtype)
        context_key, key = self.keys[layer].to(value.dtype), key.to(value.dtype)
        query, key, value = (states.unflatten(2, (-1, self.slots)) for states in (query.to(value.dtype) * scaling, key, value))
        length, outputs = query.shape[2], []
        for begin in range(0, length, CHUNK):
            end = min(begin + CHUNK, length)
            chunk = (states[:, :, begin:end] for states in (query, key, value))
            inputs = (*chunk, context_key[:, :, : end - 1], context_value[:, :, : end - 1], begin, self.causal)
            outputs.append(_attend(*inputs) if length <= LONG else checkpoint(_attend, *inputs, use_reentrant=False))
        return torch.cat(outputs, dim=2).flatten(2, 3).transpose(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    begin: int,
    causal: bool,
) -> torch.Tensor:
    """Scaled queries [B, heads, C, S, D] of the columns from `begin`; key and value [B, kv_heads, C, S, D]."""
    heads, size, slots = query.shape[1:4]
    kv_heads, visible = key.shape[1], context_key.shape[2]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # [B, kv_heads, G, C, S, D]

    seen = (grouped.flatten(2, 4) @ context_key.transpose(-1, -2)).unflatten(2, (-1, size, slots))
    columns = torch.arange(begin, begin + size, device=query.device)[:, None, None]
    seen = seen.masked_fill(torch.arange(visible, device=query.device) >= columns, -torch.inf)
    own = torch.einsum("bkgcsd,bkctd->bkgcst", grouped, key)
    if causal:
        own = own.masked_fill(torch.ones(slots, slots, dtype=torch.bool, device=query.device).triu(1), -torch.inf)

    precise = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat([seen, own], dim=-1).softmax(dim=-1, dtype=precise).to(query.dtype)
    output = (weights[..., :visible].flatten(2, 4) @ context_value).unflatten(2, (-1, size, slots))
    output = output + torch.einsum("bkgcst,bkctd->bkgcsd", weights[..., visible:], value)
    return output.flatten(1, 2)
