"""Training-time attention of a block drafter: at every column of a text stands a block of slots, as
it would when serving.

The block at column n sees the context keys of the columns before n and its own slots, if causal
only those up to each. With a window a slot sees so many columns at most, its own among them.

Legend: B rows, L columns, S slots of a block, C columns of a chunk, G queries a key-value head, D
width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from draftsmith.drafters.target.segments import Sight, Sights, chunks
from draftsmith.kernels.attention.window import Chunk, Window

# Columns whose blocks attend at once; they skip the context that none of them may see.
CHUNK = 64
# Longer texts recompute their attention weights in the backward pass.
LONG = 512


class BlockPass:
    """An `AttentionContext`. `context`: of every layer, keys and values [B, kv_heads, L, D] of the
    context; None where the first slot of each block is the context of those after it. Blocks stand
    at the columns from `first` on; where they are the context, the columns before have that slot
    alone. Where a row holds several texts, a block sees its own only."""

    def __init__(
        self,
        context: Sequence[tuple[torch.Tensor, torch.Tensor]] | None,
        *,
        slots: int,
        causal: bool | Callable[[int], bool],
        segments: torch.Tensor | None = None,
        first: int = 0,
    ):
        self.context, self.slots, self.first = context, slots, first
        self.is_causal = causal if callable(causal) else lambda layer: causal
        self.sights = Sights(segments, CHUNK)

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
        """Attention of (L - first) * S slots, block after block, behind the slots that stand
        alone."""
        if softcap is not None or sinks is not None or isinstance(sliding_window, Chunk):
            raise ValueError(
                "a block drafter with a soft cap, sinks or chunks cannot be trained; use plain "
                "attention"
            )
        # Under autocast the rotated queries and keys come wider than the values.
        own = [states.to(value.dtype) for states in (query * scaling, key, value)]
        blocks = partial(self._blocks, causal=self.is_causal(layer), window=sliding_window)
        first = self.first
        if self.context is not None:
            seen = [states.to(value.dtype) for states in self.context[layer]]
            return blocks(own, seen, first, self.slots)
        context = [
            torch.cat([states[:, :, :first], states[:, :, first :: self.slots]], dim=2)
            for states in own[1:]
        ]
        found = blocks([states[:, :, first:] for states in own], context, first, self.slots)
        if first == 0:
            return found
        return torch.cat(
            [blocks([states[:, :, :first] for states in own], context, 0, 1), found], dim=1
        )

    def _blocks(
        self,
        own: list[torch.Tensor],
        context: list[torch.Tensor],
        first: int,
        slots: int,
        *,
        causal: bool,
        window: int | None,
    ) -> torch.Tensor:
        """Queries, keys and values [B, ., C * slots, D] of C blocks from the column `first` on."""
        own = [states.unflatten(2, (-1, slots)) for states in own]
        length, outputs = first + own[0].shape[2], []
        for begin, end in chunks(first, length, CHUNK):
            sight = self.sights.of(begin, end, window)
            chunk = (states[:, :, begin - first : end - first] for states in own)
            seen = (states[:, :, sight.first : end - 1] for states in context)
            inputs = (*chunk, *seen, begin, sight, causal)
            is_long = context[0].shape[2] > LONG
            outputs.append(
                checkpoint(_attend, *inputs, use_reentrant=False) if is_long else _attend(*inputs)
            )
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
    back = slot[:, None] - slot
    hidden_slots = torch.zeros_like(back, dtype=torch.bool)
    if causal:
        hidden_slots |= back < 0
    if sight.window is not None:
        hidden_slots |= back >= sight.window
    own = own.masked_fill(hidden_slots, -torch.inf)

    precise = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat([seen, own], dim=-1).softmax(dim=-1, dtype=precise).to(query.dtype)
    output = (weights[..., :visible].flatten(2, 4) @ context_value).unflatten(2, (-1, size, slots))
    output = output + torch.einsum("bkgcst,bkctd->bkgcsd", weights[..., visible:], value)
    return output.flatten(1, 2)
