"""Attention of one step of an unroll by torch's fused attention for CPUs, without a score in memory
for each pair of columns.

What a query sees falls into parts: true keys, which fused attention takes by slices (all, causal,
or bands of a window), and keys of its own chain, one of each later step, which are elementwise
products (or of its block, which `blocks/block_unroll.py` computes). Each part gives an output and
the log of its sum of exponentials, by which the outputs are merged. The backward pass of a part
needs the merged output and sum alone, as in ring attention.

Legend: B rows, L columns, N queries, D width of a head; keys are [B, kv_heads, L, D].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from draftsmith.drafters.target.packed_pass import band_mask, bands, stretches_of
from draftsmith.kernels.dispatch import reads_freely


def fused_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    geometry: Geometry,
) -> torch.Tensor:
    """Scaled queries [B, heads, N, D] of the newest step -> [B, heads, N, D]."""
    return _Fused.apply(query, geometry, *keys, *values)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, geometry: Geometry, *states: torch.Tensor
    ) -> torch.Tensor:
        keys, values = states[: len(states) // 2], states[len(states) // 2 :]
        output, total = _Chain(query, keys, values, geometry).forward()
        parts = list(parts_of(geometry, query))
        add_parts(output, total, query, keys[0], values[0], parts)
        output = output.to(query.dtype)
        ctx.geometry, ctx.parts = geometry, parts
        ctx.save_for_backward(query, output, total, *states)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, output, total, *states = ctx.saved_tensors
        keys, values = states[: len(states) // 2], states[len(states) // 2 :]
        chain = _Chain(query, keys, values, ctx.geometry)
        of_query, *of_chain = chain.backward(gradient, output, total)
        true = (query, keys[0], values[0])
        of_true = add_gradients(of_query, true, gradient, output, total, ctx.parts)
        of_states: list[torch.Tensor | None] = []
        for first, later in zip(of_true, of_chain, strict=True):
            of_states.append(first.to(query.dtype))
            of_states += (
                later[at].squeeze(2).to(query.dtype) if at in later else None
                for at in range(1, len(keys))
            )
        return of_query.to(query.dtype), None, *of_states


class _Chain:
    """Keys of the later steps that a query sees: one each, so many columns back as steps have
    passed since."""

    def __init__(
        self,
        query: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        geometry: Geometry,
    ):
        self.step, self.precise = geometry.step, torch.promote_types(query.dtype, torch.float32)
        # [B, kv_heads, G, N, D]
        self.query = query.to(self.precise).unflatten(1, (keys[0].shape[1], -1))
        oldest = 1 if geometry.window is None else max(1, self.step + 1 - geometry.window)
        self.seen = range(oldest, self.step + 1)
        self.keys, self.values = (
            {later: states[later].to(self.precise)[:, :, None] for later in self.seen}
            for states in (keys, values)
        )

    def _places(self, later: int) -> tuple[slice, slice]:
        """Queries that have a key of this step, and their keys."""
        back = self.step - later
        return slice(back, None), slice(0, max(0, self.query.shape[3] - back))

    def _scores(self, later: int) -> torch.Tensor:
        """[B, kv_heads, G, queries that have a key]."""
        own, other = self._places(later)
        return (self.query[:, :, :, own] * self.keys[later][:, :, :, other]).sum(dim=-1)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, heads, N, D] and log of the sum of exponentials [B, heads, N]."""
        output = torch.zeros_like(self.query)
        total = output.new_full(self.query.shape[:-1], -torch.inf)
        for later in self.seen:
            own, other = self._places(later)
            value = self.values[later][:, :, :, other]
            merge(output[:, :, :, own], total[:, :, :, own], value, self._scores(later))
        return output.flatten(1, 2), total.flatten(1, 2)

    def backward(
        self, gradient: torch.Tensor, output: torch.Tensor, total: torch.Tensor
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Gradients of the query [B, heads, N, D], and of keys and values of all steps."""
        gradient, output = gradient.to(self.precise), output.to(self.precise)
        common = (gradient * output).sum(dim=-1).view(self.query.shape[:-1])
        gradient = gradient.view_as(self.query)
        total = total.view(self.query.shape[:-1])
        of_query = torch.zeros_like(self.query)
        of_keys, of_values = (
            {later: torch.zeros_like(state) for later, state in states.items()}
            for states in (self.keys, self.values)
        )
        for later in self.seen:
            own, other = self._places(later)
            key, value = (states[later][:, :, :, other] for states in (self.keys, self.values))
            out = gradient[:, :, :, own]
            weight = (self._scores(later) - total[:, :, :, own]).exp_()
            of_score = weight * ((out * value).sum(dim=-1) - common[:, :, :, own])
            of_query[:, :, :, own] += of_score.unsqueeze(-1) * key
            for_key = of_score.unsqueeze(-1) * self.query[:, :, :, own]
            of_keys[later][:, :, :, other] = for_key.sum(dim=2, keepdim=True)
            of_values[later][:, :, :, other] = (weight.unsqueeze(-1) * out).sum(2, keepdim=True)
        return of_query.flatten(1, 2), of_keys, of_values


# Queries of a band of a window.
BAND = 128
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class KeySpan(NamedTuple):
    """Consecutive columns of one text, of one row or of all."""

    rows: slice
    begin: int
    end: int


class Geometry(NamedTuple):
    """Bounds of what the queries of a step see."""

    spans: Sequence[KeySpan]
    step: int
    first: int  # column of the first query and of the first key of the later steps
    window: int | None


class KeyPart(NamedTuple):
    """Queries and the true keys that they see, as places in their tensors."""

    queries: tuple[slice, slice, slice]
    keys: tuple[slice, slice, slice]
    causal: bool
    mask: torch.Tensor | None  # [queries, keys], added to scores


def can_fuse(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Fused attention takes values as wide as keys; the sums of other devices are not asked for."""
    return reads_freely(query.device) and query.shape[-1] == value.shape[-1]


def spans_of(segments: torch.Tensor | None, length: int) -> list[KeySpan]:
    """Texts, and padding, of all rows of so many columns."""
    if segments is None:
        return [KeySpan(slice(None), 0, length)]
    return [
        KeySpan(slice(row, row + 1), begin, end)
        for row, stretches in enumerate(stretches_of(segments))
        for begin, end, _ in stretches
    ]


def parts_of(geometry: Geometry, like: torch.Tensor) -> Iterator[KeyPart]:
    """No two parts hold the same pair of query and key."""
    step, first, window = geometry.step, geometry.first, geometry.window
    for rows, begin, end in geometry.spans:
        # A query `step` columns further on is anchored at each of these.
        low, high = max(begin, first - step), end - step
        if high <= low or (window is not None and window <= step):
            continue
        if window is None or window - step >= high - begin:
            if low > begin:
                yield _part(rows, geometry, (low, high), (begin, low))
            yield _part(rows, geometry, (low, high), (low, high), causal=True)
            continue
        yield from _banded(rows, geometry, (begin, low, high), window - step, like)


def _banded(
    rows: slice, geometry: Geometry, columns: tuple[int, int, int], width: int, like: torch.Tensor
) -> Iterator[KeyPart]:
    begin, low, high = columns
    masks: dict[tuple[int, int], torch.Tensor] = {}
    for band in bands(begin, high, width, BAND):
        if band.end <= low:
            continue
        cut = band._replace(begin=max(band.begin, low))
        shape = (cut.begin - cut.first, cut.end - cut.first)
        if shape not in masks:
            seen = band_mask(cut, width, like.device)
            masks[shape] = like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        yield _part(rows, geometry, (cut.begin, cut.end), (cut.first, cut.end), mask=masks[shape])


def _part(
    rows: slice,
    geometry: Geometry,
    anchors: tuple[int, int],
    keys: tuple[int, int],
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> KeyPart:
    ahead = geometry.step - geometry.first
    place = slice(anchors[0] + ahead, anchors[1] + ahead)
    return KeyPart((rows, slice(None), place), (rows, slice(None), slice(*keys)), causal, mask)


def add_parts(
    output: torch.Tensor,
    total: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: Sequence[KeyPart],
) -> None:
    """Take true keys into output [B, heads, N, D] and log of the sum of exponentials [B, heads, N],
    in place. The query is scaled."""
    for part in parts:
        found, log_sum = _forward(
            query[part.queries], key[part.keys], value[part.keys], 0.0, part.causal,
            attn_mask=part.mask, scale=1.0,
        )  # fmt: skip
        merge(output[part.queries], total[part.queries], found, log_sum)


def add_gradients(
    of_query: torch.Tensor,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gradient: torch.Tensor,
    output: torch.Tensor,
    total: torch.Tensor,
    parts: Sequence[KeyPart],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of true keys and values; that of the query is added to `of_query`. `states` are
    query, keys and values, `output` and `total` those of all parts."""
    query, key, value = states
    of_key, of_value = (torch.zeros_like(one, dtype=total.dtype) for one in (key, value))
    for part in parts:
        places = part.queries
        found = _backward(
            gradient[places], query[places], key[part.keys], value[part.keys],
            output[places], total[places], 0.0, part.causal, attn_mask=part.mask, scale=1.0,
        )  # fmt: skip
        of_query[places] += found[0]
        of_key[part.keys] += found[1]
        of_value[part.keys] += found[2]
    return of_key, of_value


def merge(
    output: torch.Tensor, total: torch.Tensor, found: torch.Tensor, log_sum: torch.Tensor
) -> None:
    """Take a part into output and log of the sum of exponentials, in place."""
    merged = torch.logaddexp(total, log_sum)
    output.mul_((total - merged).exp_().unsqueeze(-1))
    output.addcmul_(found.to(output.dtype), (log_sum - merged).exp_().unsqueeze(-1))
    total.copy_(merged)
