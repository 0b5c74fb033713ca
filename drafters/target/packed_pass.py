"""Block-diagonal causal attention: the texts of a packed row are attended one after another, each
as if it stood alone.

Text by text, because a mask over whole rows computes L * L scores to use a small part of them, and
because it is plain causal attention then, for which the fast kernels are made. Where a window, a
soft cap or sinks need a mask, queries attend in bands, whose masks do not grow with the square of
the length. Legend: B rows, L columns, D width of a head.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.drafters.recurrent.pieces import Split, TextPiece
from draftsmith.drafters.target.segments import band_mask, bands, stretches_of
from draftsmith.kernels.attention.paged_torch import reference_attention
from draftsmith.kernels.attention.pool import Chunk, Window

# Queries of a band.
BAND = 128


class PackedPass:
    """An `AttentionContext` for a model's forward over `segments` [B, L]; its `position_ids` must
    restart in every text."""

    def __init__(self, segments: torch.Tensor):
        self.rows = stretches_of(segments)
        self.device = segments.device

    @cached_property
    def split(self) -> Split:
        """Texts from their beginning, for layers with a state."""
        texts = [
            TextPiece(row, begin, end, None, None)
            for row, stretches in enumerate(self.rows)
            for begin, end, is_text in stretches
            if is_text
        ]
        return Split([texts], None, self.device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: Window | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Under autocast the rotated queries and keys come wider than the values.
        query, key = query.to(value.dtype), key.to(value.dtype)
        outputs = []
        for row, stretches in enumerate(self.rows):
            parts = []
            for begin, end, is_text in stretches:
                q, k, v = (states[row : row + 1, :, begin:end] for states in (query, key, value))
                if not is_text:
                    parts.append(q.new_zeros(*q.shape[:-1], v.shape[-1]))
                elif isinstance(sliding_window, Chunk):
                    # Each chunk is a text of its own.
                    pieces = (x.split(sliding_window.size, dim=2) for x in (q, k, v))
                    for one, keys, values in zip(*pieces, strict=True):
                        parts.append(_attend(one, keys, values, scaling, None, softcap, sinks))
                else:
                    parts.append(_attend(q, k, v, scaling, sliding_window, softcap, sinks))
            outputs.append(torch.cat(parts, dim=2))
        return torch.cat(outputs).transpose(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One text: [1, heads, n, D] x [1, kv_heads, n, D] -> [1, heads, n, D]."""
    length = query.shape[2]
    if window is not None and window >= length:
        window = None  # it hides nothing
    if softcap is None and sinks is None and window is None:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
    width, parts = window or length, []
    for band in bands(0, length, width, BAND):
        part = query[:, :, band.begin : band.end]
        keys, values = (states[:, :, band.first : band.end] for states in (key, value))
        mask = band_mask(band, width, query.device)
        parts.append(
            scaled_dot_product_attention(
                part, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
            )
            if softcap is None and sinks is None
            else reference_attention(
                part, keys, values, mask, scaling=scaling, softcap=softcap, sinks=sinks
            )
        )
    return torch.cat(parts, dim=2)
