"""Attention classes of their own: their products of queries and keys become the pass's attention,
and everything else stays theirs."""

from __future__ import annotations

import sys
from typing import Any

import torch

from draftsmith.drafters.patches.current import current


def scores_method(module: torch.nn.Module) -> None:
    """Classes that attend in a method `_attn(query, key, value, mask)` (GPT-J, CodeGen, GPT-NeoX
    Japanese, GPT-Neo)."""
    own = module._attn
    options: dict[str, Any] = {"scaling": _scaling(module)}
    if getattr(module, "attention_type", "global") == "local":
        options["sliding_window"] = module.config.window_size

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if (now := current()) is None:
            return own(query, key, value, *rest)
        query, key = query.to(value.dtype), key.to(value.dtype)
        return now.attend(module, query, key, value, **options).transpose(1, 2), None

    module._attn = attend


def _scaling(module: torch.nn.Module) -> float:
    """Factor of the scores. GPT-Neo divides by nothing."""
    divisor = getattr(module, "scale_attn", None) or getattr(module, "norm_factor", None) or 1.0
    return 1.0 / float(divisor)


def bert(module: torch.nn.Module) -> None:
    """Classes made after BERT's old one (RemBERT, Megatron-BERT)."""
    own = module.forward
    size = module.attention_head_size

    def forward(hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if (now := current()) is None:
            return own(hidden_states, *rest, **named)
        query, key, value = (
            part(hidden_states).unflatten(-1, (-1, size)).transpose(1, 2)
            for part in (module.query, module.key, module.value)
        )
        return now.attend(module, query, key, value, scaling=size**-0.5).flatten(2), None

    module.forward = forward


def falcon(module: torch.nn.Module) -> None:
    """Falcon with rotary embeddings, whose forward computes its scores itself. With alibi it stays
    as it is, and the probe refuses it."""
    own = module.forward
    rotate = vars(sys.modules[type(module).__module__])["apply_rotary_pos_emb"]

    def forward(hidden_states: torch.Tensor, alibi: Any, *rest: Any, **named: Any) -> Any:
        now = current()
        if now is None or alibi is not None:
            return own(hidden_states, alibi, *rest, **named)
        heads = module._split_heads(module.query_key_value(hidden_states))
        query, key, value = (states.transpose(1, 2) for states in heads)
        query, key = rotate(query, key, *named["position_embeddings"])
        out = now.attend(module, query, key, value, scaling=module.inv_norm_factor)
        return module.dense(out.flatten(2)), None

    module.forward = forward
