"""Attention of blocks of slots with all scores of a chunk of columns, for short texts and
for devices without another form of it.

Legend: B rows, L columns, S slots of a block, C columns of a chunk, G queries a key-value head, D
width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from draftsmith.drafters.blocks.fused_blocks import Blocks
from draftsmith.drafters.target.segments import Sight, Sights, chunks

# Columns whose blocks attend at once; they skip the context that none of them may see.
CHUNK = 64


def dense_blocks(
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    context: Sequence[torch.Tensor],
    blocks: Blocks,
    sights: Sights,
    *,
    recomputed: bool,
) -> torch.Tensor:
    """As `fused_blocks`; `sights` are of chunks of `CHUNK` columns. Scores are kept for the
    backward pass, or recomputed there."""
    attend = partial(checkpoint, _attend, use_reentrant=False) if recomputed else _attend
    first, states = blocks.first, [one.unflatten(2, (-1, blocks.slots)) for one in (query, *own)]
    outputs = []
    for begin, end in chunks(first, first + states[0].shape[2], CHUNK):
        sight = sights.of(begin, end, blocks.window)
        part, key, value = (one[:, :, begin - first : end - first] for one in states)
        seen_key, seen_value = (one[:, :, sight.first : end - 1] for one in context)
        outputs.append(attend(part, key, value, seen_key, seen_value, begin, sight, blocks))
    return torch.cat(outputs, dim=2).flatten(2, 3)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    begin: int,
    sight: Sight,
    blocks: Blocks,
) -> torch.Tensor:
    """Scaled queries [B, heads, C, S, D] of the columns from `begin`; key and value [B, kv_heads,
    C, S, D]; the context's from the column `sight.first` on."""
    heads, size, slots = query.shape[1:4]
    kv_heads, visible = key.shape[1], context_key.shape[2]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # [B, kv_heads, G, C, S, D]

    seen = (grouped.flatten(2, 4) @ context_key.transpose(-1, -2)).unflatten(2, (-1, size, slots))
    columns = torch.arange(begin, begin + size, device=query.device)[:, None, None]
    context_columns = torch.arange(sight.first, sight.first + visible, device=query.device)
    hidden = context_columns >= columns
    slot = torch.arange(slots, device=query.device)
    if sight.window is not None:
        hidden = hidden | (columns + slot[:, None] - context_columns >= sight.window)
    if sight.begins is not None:
        hidden = hidden | (context_columns < sight.begins[:, None, None, :, None, None])
    seen = seen.masked_fill(hidden, -torch.inf)
    own = torch.einsum("bkgcsd,bkctd->bkgcst", grouped, key)
    own = own.masked_fill(blocks.hidden_slots(query.device), -torch.inf)

    precise = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat([seen, own], dim=-1).softmax(dim=-1, dtype=precise).to(query.dtype)
    output = (weights[..., :visible].flatten(2, 4) @ context_value).unflatten(2, (-1, size, slots))
    output = output + torch.einsum("bkgcst,bkctd->bkgcsd", weights[..., visible:], value)
    return output.flatten(1, 2)
