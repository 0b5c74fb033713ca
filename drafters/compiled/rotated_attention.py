"""Rotation and attention of a captured forward on a GPU: over a paged pool one launch normalises
and rotates queries and keys and writes keys and values where attention reads them."""

from __future__ import annotations

import torch

from draftsmith.drafters.compiled.capture import attend
from draftsmith.drafters.target.attention import AttentionContext
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.paged_compiled import CompiledContext
from draftsmith.kernels.attention.pool import Chunk
from draftsmith.kernels.products.row_steps_triton import (
    HeadNorms,
    Norm,
    WrittenKeys,
    rotate,
    rotate_and_write,
)

# Weights of query and key, then the numbers of `Norm`.
Norms = tuple[torch.Tensor, torch.Tensor, float, float, bool]


def attend_rotated(
    context: AttentionContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: Norms | None,
    layer: int,
    scaling: float,
    window: int | None,
    chunked: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`capture.attend` of heads that are not yet normalised, where `norms` says so, and rotated."""
    if type(context) is not PagedPass or isinstance(context.context, CompiledContext):
        query, key = _rotated(query, key, cosine, sine, norms)
        return attend(context, query, key, value, layer, scaling, window, chunked, softcap, sinks)
    keys, values = context.pool.keys[layer], context.pool.values[layer]
    written = WrittenKeys(key, value, keys, values, context.slots)
    head_norms = None if norms is None else HeadNorms(*norms)
    query = rotate_and_write(query, written, cosine, sine, head_norms)
    out = context.context.attend(
        query,
        keys,
        values,
        scaling=scaling,
        window=Chunk(window) if window and chunked else window,
        softcap=softcap,
        sinks=sinks,
    )
    return out.unsqueeze(0)


def _rotated(
    query: torch.Tensor,
    key: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: Norms | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if norms is None:
        return rotate(query, cosine, sine), rotate(key, cosine, sine)
    query_weight, key_weight, eps, offset, wide = norms
    norm = Norm(eps, offset, wide)
    return (
        rotate(query, cosine, sine, query_weight, norm),
        rotate(key, cosine, sine, key_weight, norm),
    )
