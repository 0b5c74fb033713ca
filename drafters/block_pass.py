"""Training-time attention of a block drafter: at every column of a text stands a block of slots, as it would when serving.

The block at column n sees the context keys of the columns before n and its own slots, if causal only those up to each.

Legend: B rows, L columns, S slots of a block, C columns of a chunk, G queries a key-value head, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint

from draftsmith.drafters.segments import Sight, Sights, chunks

# Columns whose blocks attend at once; they skip the context that none of them may see.
CHUNK = 64
# Longer texts recompute their attention weights in the backward pass.
LONG = 512


class BlockPass:
    """An `AttentionContext`. `context`: of every layer, keys and values [B, kv_heads, L, D] of the context; None where the first
    slot of each block is the context of those after it. Blocks stand at the columns from `first` on. Where a row holds several
    texts, a block sees its own only."""

    def __init__(
        self,
        context: Sequence[tuple[torch.Tensor, torch.Tensor]] | None,
        *,
        slots: int,
        causal: bool,
        segments: torch.Tensor | None = None,
        first: int = 0,
    ):
        self.context, self.slots, self.causal, self.first = context, slots, causal, first
        self.sights = Sights(segments, CHUNK)

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
        """Of (L - first) * S slots, block after block."""
        if sliding_window is not None or softcap is not None or sinks is not None:
            raise ValueError("a block drafter with a sliding window, soft cap or sinks cannot be trained; use plain attention")
        # Under autocast the rotated queries and keys come wider than the values.
        blocks = (states.to(value.dtype).unflatten(2, (-1, self.slots)) for states in (query * scaling, key, value))
        query, key, value = blocks
        pair = (key[:, :, :, 0], value[:, :, :, 0]) if self.context is None else self.context[layer]
        context_key, context_value = (states.to(value.dtype) for states in pair)
        length, outputs = self.first + query.shape[2], []
        for begin, end in chunks(self.first, length, CHUNK):
            chunk = (states[:, :, begin - self.first : end - self.first] for states in (query, key, value))
            sight = self.sights.of(begin, end)
            context = (states[:, :, sight.first : end - 1] for states in (context_key, context_value))
            inputs = (*chunk, *context, begin, sight, self.causal)
            outputs.append(_attend(*inputs) if length <= LONG else checkpoint(_attend, *inputs, use_reentrant=False))
        return torch.cat(outputs, dim=2).flatten(2, 3).transpose(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    begin: int,
    sight: Sight,
    causal: bool,
) -> torch.Tensor:
    """Scaled queries [B, heads, C, S, D] of the columns from `begin`; key and value [B, kv_heads, C, S, D]; the context's from
    the column `sight.first` on."""
    heads, size, slots = query.shape[1:4]
    kv_heads, visible = key.shape[1], context_key.shape[2]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # [B, kv_heads, G, C, S, D]

    seen = (grouped.flatten(2, 4) @ context_key.transpose(-1, -2)).unflatten(2, (-1, size, slots))
    columns = torch.arange(begin, begin + size, device=query.device)[:, None, None]
    context_columns = torch.arange(sight.first, sight.first + visible, device=query.device)
    hidden = context_columns >= columns
    if sight.begins is not None:
        hidden = hidden | (context_columns < sight.begins[:, None, None, :, None, None])
    seen = seen.masked_fill(hidden, -torch.inf)
    own = torch.einsum("bkgcsd,bkctd->bkgcst", grouped, key)
    if causal:
        own = own.masked_fill(torch.ones(slots, slots, dtype=torch.bool, device=query.device).triu(1), -torch.inf)

    precise = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat([seen, own], dim=-1).softmax(dim=-1, dtype=precise).to(query.dtype)
    output = (weights[..., :visible].flatten(2, 4) @ context_value).unflatten(2, (-1, size, slots))
    output = output + torch.einsum("bkgcst,bkctd->bkgcsd", weights[..., visible:], value)
    return output.flatten(1, 2)
