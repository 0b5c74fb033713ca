"""Attention of a ragged batch over a paged pool of keys and values; chain verification is its causal case.

Legend: T tokens of the pass, rows one after another; B rows; L layers; S = num_blocks * block_size slots.
Position p of a row lives in slot `block_tables[row, p // block_size] * block_size + p % block_size`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class PagedPool:
    """Keys and values of every layer. Tensors keep their addresses for the life of the pool."""

    keys: list[torch.Tensor]  # L x [S, kv_heads, key_dim]
    values: list[torch.Tensor]  # L x [S, kv_heads, value_dim]
    block_size: int

    @classmethod
    def empty(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> PagedPool:
        slots = num_blocks * block_size
        # Zeros, not uninitialised memory: a masked slot still meets a zero weight, and 0 * NaN is NaN.
        keys = [torch.zeros(slots, num_kv_heads, key_dim, device=device, dtype=dtype) for _ in range(num_layers)]
        values = [torch.zeros(slots, num_kv_heads, value_dim or key_dim, device=device, dtype=dtype) for _ in range(num_layers)]
        return cls(keys, values, block_size)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class PagedPass:
    """The `AttentionContext` of one forward pass: writes the pass's keys and values to the pool, then attends causally.

    Args:
        pool: where keys and values live; written in place.
        block_tables: [B, max_blocks] int64.
        positions: [T] int64, absolute, ascending within a row; a row's context is everything up to its last position.
        lengths: [B] int64, tokens of each row in this pass, each >= 1; sums to T.
    """

    def __init__(self, pool: PagedPool, block_tables: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor):
        self.pool = pool
        size = pool.block_size
        rows = torch.repeat_interleave(torch.arange(len(lengths), device=positions.device), lengths)
        self.slots = block_tables[rows, positions // size] * size + positions % size
        self.spans: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        begin = 0
        for row, length in enumerate(lengths.tolist()):
            end = begin + length
            context = torch.arange(int(positions[end - 1]) + 1, device=positions.device)
            context_slots = block_tables[row, context // size] * size + context % size
            self.spans.append((begin, end, context_slots, positions[begin:end]))
            begin = end

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
        """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads, value_dim]."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys[self.slots] = key[0].transpose(0, 1).to(keys.dtype)
        values[self.slots] = value[0].transpose(0, 1).to(values.dtype)
        outputs = []
        for begin, end, context_slots, positions in self.spans:
            k = keys[context_slots].transpose(0, 1).to(query.dtype)
            v = values[context_slots].transpose(0, 1).to(query.dtype)
            mask = _causal_mask(positions, len(context_slots), sliding_window)
            q = query[0, :, begin:end]
            if softcap is None and sinks is None:
                out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=q.shape[0] != k.shape[0])
            else:
                out = reference_attention(q, k, v, mask, scaling=scaling, softcap=softcap, sinks=sinks)
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs).unsqueeze(0)


def _causal_mask(positions: torch.Tensor, num_context: int, sliding_window: int | None) -> torch.Tensor | None:
    """[t, num_context] bool, True where a query may look; None when it may look at all of it."""
    if len(positions) == 1 and (sliding_window is None or num_context <= sliding_window):
        return None
    distance = positions[:, None] - torch.arange(num_context, device=positions.device)[None, :]
    mask = distance >= 0
    return mask if sliding_window is None else mask & (distance < sliding_window)


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Soft-capped scores (Gemma 2) and per-head sinks: [heads, t, dim] x [kv_heads, n, dim] -> [heads, t, dim]."""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = (query @ key.transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sinks is None:
        return torch.softmax(scores.float(), dim=-1).to(value.dtype) @ value
    # A sink is one more logit per head that takes weight and gives no value.
    column = sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1).to(scores.dtype)
    weights = torch.softmax(torch.cat([scores, column], dim=-1).float(), dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value
