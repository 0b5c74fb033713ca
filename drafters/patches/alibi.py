"""Alibi: a bias of the scores by the position of the key, a slope per head.

Queries and keys get two more columns whose product is that bias, so that the pool holds positions
beside keys and every attention is as it was: slope * position = (256 * slope) * (position //
256) + slope * (position % 256), whose factors are exact in half precision too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from draftsmith.drafters.patches.current import CurrentPass, current

LOW = 256


def bloom(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *rest: Any, **named: Any
) -> Any:
    """`forward` of BLOOM's attention."""
    if (now := current()) is None:
        return type(self).forward(self, hidden_states, residual, *rest, **named)
    bias_of = vars(sys.modules[type(self).__module__])["build_alibi_tensor"]
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    # Of two neighbouring keys, the later has a bias larger by the slope.
    two = torch.ones(1, 2, dtype=torch.long, device=hidden_states.device)
    bias = bias_of(two, self.num_heads, torch.float32)[:, 0]
    slopes = bias[:, 1] - bias[:, 0]
    out = _attend(now, self, query, key, value, slopes, self.inv_norm_factor)
    return self.dense(out) + residual, None


def bloom_bias(self: Any, *inputs: Any, **named: Any) -> torch.Tensor | None:
    """`build_alibi_tensor` of BLOOM's body, which would make the bias of another layout out of the
    mask."""
    return type(self).build_alibi_tensor(self, *inputs, **named) if current() is None else None


def mpt(self: Any, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """`forward` of MPT's attention."""
    if (now := current()) is None:
        return type(self).forward(self, hidden_states, *rest, **named)
    bias_of = vars(sys.modules[type(self).__module__])["build_mpt_alibi_tensor"]
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        part.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2)
        for part in mixed.chunk(3, dim=2)
    )
    # Of two neighbouring keys, the later has a bias larger by the slope.
    bias = bias_of(self.n_heads, 2, device=hidden_states.device)[:, 0]
    slopes = bias[:, 1] - bias[:, 0]
    out = _attend(now, self, query, key, value, slopes, self.softmax_scale)
    return self.out_proj(out), None


def _attend(
    now: CurrentPass,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Three of [1, heads, T, dim], slopes [heads] -> [1, T, heads * dim]."""
    places = now.positions.to(query.device)[0]
    columns = torch.stack([places // LOW, places % LOW], dim=-1).to(key.dtype)
    weights = torch.stack([slopes * LOW, slopes], dim=-1) / scaling
    query = torch.cat(
        [query, weights.to(query.dtype)[None, :, None].expand(*query.shape[:3], 2)], -1
    )
    key = torch.cat([key, columns.expand(*key.shape[:2], -1, -1)], dim=-1)
    return now.attend(module, query, key, value, scaling=scaling).flatten(2)
