"""Attention of blocks of slots by torch's fused attention for CPUs: the context by `fused_parts`,
in which the slots of a block are further heads of its column's query, and the few slots of a block
among themselves.

Legend: B rows, L columns, N blocks, S slots of a block, G queries a key-value head, D width of a
head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from draftsmith.drafters.unrolled.fused_parts import (
    Geometry,
    KeyPart,
    KeySpan,
    add_gradients,
    add_parts,
    parts_of,
    spans_of,
)


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
    with torch.autocast(query.device.type, enabled=False):
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
