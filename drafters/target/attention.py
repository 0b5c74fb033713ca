"""One attention function for transformers' modules, unchanged: where keys and values live is
decided by a context object.

`model(..., attention_context=context)` reaches every attention module through transformers'
`AttentionInterface`. Serving passes a paged pass, training passes an unroll, and without a context
it is plain causal attention. Register once per process with `register()`, load models with
`attn_implementation=IMPLEMENTATION`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftsmith.drafters.quirks.patches import current
from draftsmith.kernels.attention.paged_torch import reference_attention
from draftsmith.kernels.attention.pool import Chunk, Scoring

IMPLEMENTATION = "draftsmith"


class AttentionContext(Protocol):
    """Owns the keys and values of one forward pass."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        """query [b, heads, t, dim], key and value [b, kv_heads, t, dim] -> [b, t, heads,
        value_dim]."""
        ...


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attention_context: AttentionContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    query_scale: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature; see `AttentionInterface`. `query_scale` broadcasts to the
    query."""
    # Not every decoder layer passes on what it has no name for.
    if attention_context is None and (now := current()) is not None:
        attention_context = now.context
    if attention_context is None and softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_context is None:
        rule = Scoring(scaling, None, softcap, s_aux)
        return _plain(query, key, value, attention_mask, rule), None
    if query_scale is not None:
        query = (query * query_scale).to(query.dtype)
    window = chunk_of(module) if sliding_window is None else sliding_window
    rule = Scoring(scaling, window, softcap, s_aux)
    output = attention_context.attend(module.layer_idx, query, key, value, rule)
    # As transformers' own functions give it: some modules take a view of it.
    return output.contiguous(), None


def chunk_of(module: torch.nn.Module) -> Chunk | None:
    """The chunks that an attention module's layer has by its configuration: transformers' modules
    keep windows, and leave chunks to the mask."""
    config = getattr(module, "config", None)
    size = getattr(config, "attention_chunk_size", None)
    types = (getattr(config, "layer_types", None) or ())[module.layer_idx :]
    return Chunk(size) if size and types and types[0] == "chunked_attention" else None


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    rule: Scoring,
) -> torch.Tensor:
    """Causal attention without a context for the models that SDPA cannot express. `mask` [b, 1, t,
    n] bool or None."""
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[2] - query.shape[2]).expand(query.shape[0], 1, -1, -1)
    # A padding row may look nowhere; NaN there would spread through its values, so it looks
    # everywhere instead.
    mask = mask | ~mask.any(dim=-1, keepdim=True)
    rows = [
        reference_attention(q, k, v, m, rule)
        for q, k, v, m in zip(query, key, value, mask.expand(query.shape[0], -1, -1, -1))
    ]
    return torch.stack(rows).transpose(1, 2).contiguous()


def register() -> str:
    """Makes `attn_implementation="draftsmith"` known to transformers; safe to call again. Returns
    the name."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    # A name without a mask function silently gets no mask at all; SDPA's masks serve the passes
    # without a context.
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    return IMPLEMENTATION
