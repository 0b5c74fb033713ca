"""Training-time attention of a block drafter: at every column of a text stands a block of slots, as
it would when serving.

The block at column n sees the context keys of the columns before n and its own slots, if causal
only those up to each. With a window a slot sees so many columns at most, its own among them.

Short texts, and devices without another form of it, keep all scores of a chunk of columns. Long
texts on a CPU take torch's fused attention: the context by `unrolled/fused_unroll.py`, in which the
slots of a block are further heads of its column's query, and the few slots of a block among
themselves.

Legend: B rows, L columns, N blocks, S slots of a block, C columns of a chunk, G queries a key-value
head, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from draftsmith.drafters.target.packed_pass import Sight, Sights, begins_of, chunks
from draftsmith.drafters.unrolled.flex import LimitReached, Sees, block_mask, can_flex, flex
from draftsmith.drafters.unrolled.fused_unroll import (
    Geometry,
    KeyPart,
    KeySpan,
    add_gradients,
    add_parts,
    can_fuse,
    parts_of,
    spans_of,
)
from draftsmith.kernels.attention.pool import Chunk, Scoring
from draftsmith.kernels.dispatch import autocast

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
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        """Attention of (L - first) * S slots, block after block, behind the slots that stand
        alone."""
        if not rule.has_plain_scores or isinstance(rule.window, Chunk):
            raise ValueError(
                "a block drafter with a soft cap, sinks or chunks cannot be trained; use plain "
                "attention"
            )
        # Under autocast the rotated queries and keys come wider than the values.
        query = query * rule.scaling
        query, key, value = (states.to(value.dtype) for states in (query, key, value))
        blocks = partial(self._blocks, causal=self.is_causal(layer), window=rule.window)
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


@dataclass(frozen=True, eq=False)
class Blocks:
    """Bounds of what the slots of a pass see."""

    segments: torch.Tensor | None  # [B, length]
    length: int  # columns of the context
    first: int  # column of the first block
    slots: int
    causal: bool
    window: int | None

    @cached_property
    def spans(self) -> list[KeySpan]:
        """Waits for the device of `segments`."""
        return spans_of(self.segments, self.length)

    def hidden_slots(self, device: torch.device) -> torch.Tensor:
        """[S, S] True where a slot does not see one of its own block."""
        slot = torch.arange(self.slots, device=device)
        back = slot[:, None] - slot
        hidden = back < 0 if self.causal else torch.zeros_like(back, dtype=torch.bool)
        return hidden if self.window is None else hidden | (back >= self.window)

    def parts(self, like: torch.Tensor) -> Iterator[KeyPart]:
        """Parts of the context. A block stands one column behind the last that it sees, as a query
        of an unroll's first further step does, and the window of each slot ends with the slot."""
        if self.window is None:
            yield from parts_of(Geometry(self.spans, 1, self.first, None), like)
            return
        for slot in range(self.slots):
            for part in parts_of(Geometry(self.spans, 1, self.first, self.window - slot), like):
                rows, _, places = part.queries
                heads = slice(slot, None, self.slots)
                yield part._replace(queries=(rows, heads, places))


def fused_blocks(
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    context: tuple[torch.Tensor, torch.Tensor],
    blocks: Blocks,
) -> torch.Tensor:
    """Scaled queries [B, heads, N * S, D], own keys and values [B, kv_heads, N * S, D], and the
    context's [B, kv_heads, L, D] -> [B, heads, N * S, D]."""
    # Autocast would take the products of a block's own slots, which are in more digits, for others.
    with autocast(query.device, enabled=False):
        return _Fused.apply(query, *own, *context, blocks)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context_key: torch.Tensor,
        context_value: torch.Tensor,
        blocks: Blocks,
    ) -> torch.Tensor:
        query = _as_heads(query, blocks.slots)
        output, total = _Own(query, key, value, blocks).forward()
        parts = list(blocks.parts(query))
        add_parts(output, total, query, context_key, context_value, parts)
        output = output.to(query.dtype)
        ctx.blocks, ctx.parts = blocks, parts
        ctx.save_for_backward(query, key, value, context_key, context_value, output, total)
        return _as_slots(output, blocks.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, context_key, context_value, output, total = ctx.saved_tensors
        gradient, slots = _as_heads(gradient, ctx.blocks.slots), ctx.blocks.slots
        of_query, *of_own = _Own(query, key, value, ctx.blocks).backward(gradient, output, total)
        true = (query, context_key, context_value)
        of_context = add_gradients(of_query, true, gradient, output, total, ctx.parts)
        found = (_as_slots(of_query, slots), *of_own, *of_context)
        return *(one.to(query.dtype) for one in found), None


def _as_heads(states: torch.Tensor, slots: int) -> torch.Tensor:
    """[B, heads, N * S, D] -> [B, heads * S, N, D]."""
    return states.unflatten(2, (-1, slots)).transpose(2, 3).flatten(1, 2)


def _as_slots(states: torch.Tensor, slots: int) -> torch.Tensor:
    """The inverse."""
    return states.unflatten(1, (-1, slots)).transpose(2, 3).flatten(2, 3)


class _Own:
    """Keys of a query's own block. Queries, outputs and sums have slots as heads."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks):
        self.precise = torch.promote_types(query.dtype, torch.float32)
        self.slots, self.kv_heads = blocks.slots, key.shape[1]
        self.hidden = blocks.hidden_slots(query.device)
        self.shape = query.shape
        self.query = self._by_block(query)
        self.key, self.value = (
            one.to(self.precise).contiguous().unflatten(2, (-1, self.slots)) for one in (key, value)
        )  # [B, kv_heads, N, S, D]

    def _by_block(self, states: torch.Tensor) -> torch.Tensor:
        """[B, heads * S, N, ...] -> [B, kv_heads, N, G * S, ...]."""
        # Products of many small matrices are one call where each is contiguous.
        by_block = states.to(self.precise).unflatten(1, (self.kv_heads, -1)).transpose(2, 3)
        return by_block.contiguous()

    def _by_head(self, states: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        return states.transpose(2, 3).flatten(1, 2).contiguous()

    def _scores(self) -> torch.Tensor:
        """[B, kv_heads, N, G * S, S]."""
        scores = self.query @ self.key.transpose(-1, -2)
        return (
            scores.unflatten(3, (-1, self.slots)).masked_fill(self.hidden, -torch.inf).flatten(3, 4)
        )

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, heads * S, N, D] and log of the sum of exponentials [B, heads * S, N]."""
        scores = self._scores()
        total = scores.logsumexp(dim=-1)
        output = (scores - total[..., None]).exp_() @ self.value
        return self._by_head(output), self._by_head(total)

    def backward(
        self, gradient: torch.Tensor, output: torch.Tensor, total: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the query, keys and values."""
        out = self._by_block(gradient)
        common = (out * self._by_block(output)).sum(dim=-1, keepdim=True)
        weight = (self._scores() - self._by_block(total)[..., None]).exp_()
        of_score = weight * (out @ self.value.transpose(-1, -2) - common)
        of_key = of_score.transpose(-1, -2) @ self.query
        of_value = weight.transpose(-1, -2) @ out
        of_query = self._by_head(of_score @ self.key)
        return of_query, of_key.flatten(2, 3), of_value.flatten(2, 3)
