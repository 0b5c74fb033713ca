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


def bloom(module: torch.nn.Module) -> None:
    own = module.forward
    slopes_of = vars(sys.modules[type(module).__module__])["_get_alibi_slopes"]

    def forward(
        hidden_states: torch.Tensor, residual: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        if (now := current()) is None:
            return own(hidden_states, residual, *rest, **named)
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        slopes = slopes_of(module.num_heads, hidden_states.device)
        out = _attend(now, module, query, key, value, slopes, module.inv_norm_factor)
        return module.dense(out) + residual, None

    module.forward = forward


def bloom_body(module: torch.nn.Module) -> None:
    """Its own bias, which it would make of the mask, is that of another layout."""
    own = module.build_alibi_tensor

    def build_alibi_tensor(*inputs: Any, **named: Any) -> torch.Tensor | None:
        return own(*inputs, **named) if current() is None else None

    module.build_alibi_tensor = build_alibi_tensor


def mpt(module: torch.nn.Module) -> None:
    own = module.forward
    bias_of = vars(sys.modules[type(module).__module__])["build_mpt_alibi_tensor"]

    def forward(hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if (now := current()) is None:
            return own(hidden_states, *rest, **named)
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        query, key, value = (
            part.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2)
            for part in mixed.chunk(3, dim=2)
        )
        # Of two neighbouring keys, the later has a bias larger by the slope.
        bias = bias_of(module.n_heads, 2, device=hidden_states.device)[:, 0]
        slopes = bias[:, 1] - bias[:, 0]
        return module.out_proj(
            _attend(now, module, query, key, value, slopes, module.softmax_scale)
        ), None

    module.forward = forward


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
