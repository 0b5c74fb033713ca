"""Training-time attention of a block drafter: at every column of a text stands a block of slots, as
it would when serving.

The block at column n sees the context keys of the columns before n and its own slots, if causal
only those up to each. With a window a slot sees so many columns at most, its own among them.

Legend: B rows, L columns, S slots of a block, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from draftsmith.drafters.blocks.dense_blocks import CHUNK, dense_blocks
from draftsmith.drafters.blocks.fused_blocks import Blocks, fused_blocks
from draftsmith.drafters.target.segments import Sights, begins_of
from draftsmith.drafters.unrolled.flex import LimitReached, Sees, block_mask, can_flex, flex
from draftsmith.drafters.unrolled.fused_parts import can_fuse
from draftsmith.kernels.attention.pool import Chunk, Window

# Of longer texts no scores are kept: fused attention on a CPU and `flex_attention` on a CUDA device
# do not make them, and otherwise they are recomputed in the backward pass. Of 160 columns fused
# attention takes as long as scores do in float32, and twice as long in bfloat16 (AMD EPYC with
# AVX-512, forward and backward).
LONG = 512

Attended = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, keys and values


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
        self.segments, self.sights = segments, Sights(segments, CHUNK)
        self._bounds: dict[tuple[int, ...], Blocks] = {}
        self._masks: dict[Blocks, BlockMask] = {}

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
        query, key, value = (states.to(value.dtype) for states in (query * scaling, key, value))
        blocks = partial(self._blocks, causal=self.is_causal(layer), window=sliding_window)
        first = self.first
        if self.context is not None:
            seen = [states.to(value.dtype) for states in self.context[layer]]
            return blocks((query, key, value), seen, first, self.slots).transpose(1, 2)
        context = [
            torch.cat([states[:, :, :first], states[:, :, first :: self.slots]], dim=2)
            for states in (key, value)
        ]
        behind = tuple(states[:, :, first:] for states in (query, key, value))
        found = blocks(behind, context, first, self.slots)
        if first:
            alone = tuple(states[:, :, :first] for states in (query, key, value))
            before = blocks(alone, [states[:, :, :first] for states in context], 0, 1)
            found = torch.cat([before, found], dim=2)
        return found.transpose(1, 2)

    def _blocks(
        self,
        own: Attended,
        context: Sequence[torch.Tensor],
        first: int,
        slots: int,
        *,
        causal: bool,
        window: int | None,
    ) -> torch.Tensor:
        """Queries, keys and values [B, ., N * slots, D] of N blocks from the column `first` on ->
        [B, heads, N * slots, value dim]."""
        query, key, value = own
        length = context[0].shape[2]
        segments = None if self.segments is None else self.segments[:, :length]
        asked = (first, slots, int(causal), window or 0)
        if asked not in self._bounds:
            self._bounds[asked] = Blocks(segments, length, first, slots, causal, window)
        bounds = self._bounds[asked]
        if length > LONG and can_flex(query, value):
            with suppress(LimitReached):
                return self._flex(own, context, bounds)
        if length <= LONG or not can_fuse(query, query):
            dense = partial(dense_blocks, recomputed=length > LONG)
            return dense(query, (key, value), context, bounds, self.sights)
        # Fused attention takes values as wide as keys.
        width = max(key.shape[-1], value.shape[-1])
        query, key, context_key = (_wide(one, width) for one in (query, key, context[0]))
        values = (_wide(value, width), _wide(context[1], width))
        found = fused_blocks(query, (key, values[0]), (context_key, values[1]), bounds)
        return found[..., : value.shape[-1]]

    def _flex(self, own: Attended, context: Sequence[torch.Tensor], blocks: Blocks) -> torch.Tensor:
        query, *behind = own
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, behind, strict=True))
        if blocks not in self._masks:
            rows = None if blocks.segments is None else len(query)
            self._masks[blocks] = block_mask(_seen(blocks, query), rows, query, keys.shape[2])
        return flex(query, keys, values, self._masks[blocks])


def _wide(states: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - states.shape[-1]
    return pad(states, (0, missing)) if missing else states


def _seen(blocks: Blocks, like: torch.Tensor) -> Sees:
    """Keys of the context stand before those of the blocks. What `sees` needs is looked up, as
    torch does not compile divisions of indices without bounds."""
    segments, length = blocks.segments, blocks.length
    first, slots, window, causal = blocks.first, blocks.slots, blocks.window, blocks.causal
    every = torch.arange(length, device=like.device)
    columns = every[first:].repeat_interleave(slots)
    slot = torch.arange(slots, device=like.device).repeat(length - first)
    key_columns = torch.cat([every, columns])
    key_slots = torch.cat([torch.full_like(every, -1), slot])  # -1 for the context
    key_places = key_columns + key_slots.clamp(min=0)
    begins = None if segments is None else begins_of(segments)[:, columns]

    def sees(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        column, own = columns[query], key_columns[key] == columns[query]
        before = key_columns[key] < column
        if begins is not None:
            before = before & (key_columns[key] >= begins[row, query])
        if causal:
            own = own & (key_slots[key] <= slot[query])
        seen = torch.where(key_slots[key] < 0, before, own)
        if window is not None:
            seen = seen & (column + slot[query] - key_places[key] < window)
        return seen

    return sees
