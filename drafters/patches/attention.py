"""Attention classes of their own: their products of queries and keys become the pass's attention,
and everything else stays theirs."""

from __future__ import annotations

import sys
from typing import Any

import torch

from draftsmith.drafters.patches.current import current


def scores(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`_attn` of classes that attend in such a method (GPT-J, CodeGen, GPT-NeoX Japanese,
    GPT-Neo)."""
    if (now := current()) is None:
        return type(self)._attn(self, query, key, value, *rest)
    # GPT-Neo divides by nothing.
    divisor = getattr(self, "scale_attn", None) or getattr(self, "norm_factor", None) or 1.0
    options: dict[str, Any] = {"scaling": 1.0 / float(divisor)}
    if getattr(self, "attention_type", "global") == "local":
        options["sliding_window"] = self.config.window_size
    query, key = query.to(value.dtype), key.to(value.dtype)
    return now.attend(self, query, key, value, **options).transpose(1, 2), None


def bert(self: Any, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """`forward` of classes made after BERT's old one (RemBERT, Megatron-BERT)."""
    if (now := current()) is None:
        return type(self).forward(self, hidden_states, *rest, **named)
    size = self.attention_head_size
    query, key, value = (
        part(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2)
        for part in (self.query, self.key, self.value)
    )
    return now.attend(self, query, key, value, scaling=size**-0.5).flatten(2), None


def falcon(
    self: Any, hidden_states: torch.Tensor, alibi: torch.Tensor | None, *rest: Any, **named: Any
) -> Any:
    """`forward` of Falcon with rotary embeddings. With alibi it stays as it is, and the probe
    refuses it."""
    now = current()
    if now is None or alibi is not None:
        return type(self).forward(self, hidden_states, alibi, *rest, **named)
    rotate = vars(sys.modules[type(self).__module__])["apply_rotary_pos_emb"]
    heads = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (states.transpose(1, 2) for states in heads)
    query, key = rotate(query, key, *named["position_embeddings"])
    out = now.attend(self, query, key, value, scaling=self.inv_norm_factor)
    return self.dense(out.flatten(2)), None


def numbered(self: Any, *inputs: Any, layer_idx: int, **named: Any) -> Any:
    """`forward` of Zamba2's, which has the number of its layer in calls alone; keys and values go
    by the module's."""
    self.layer_idx = layer_idx
    return type(self).forward(self, *inputs, layer_idx=layer_idx, **named)
