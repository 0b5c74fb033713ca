"""Attention of training passes by torch's fused attention for CPUs, without a score in memory for
each pair of columns.

What a query sees falls into parts: true keys, which fused attention takes by slices (all, causal,
or bands of a window), and the few keys of its own column, which are products of small matrices.
Each part gives an output and the log of its sum of exponentials, by which the outputs are merged.
The backward pass of a part needs the merged output and sum alone, as in ring attention.

Legend: B rows, L columns, N columns with queries, S queries of a column, O own keys of it, G
queries a key-value head, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask

from draftsmith.drafters.target.packed_pass import band_mask, bands, stretches_of
from draftsmith.kernels.dispatch import autocast


@dataclass(eq=False)
class Geometry:
    """Bounds of what the queries of a pass see, some at every column from `first` on: at column t
    the true keys of the columns up to t - `step`, and the own keys of t, of which the last ones
    stand at the queries' places."""

    segments: torch.Tensor | None  # [B, length]
    length: int  # columns of the true keys
    first: int
    step: int
    num_own: int
    window: int | None
    slots: int = 1  # queries of a column; each stands one place behind the one before
    causal: bool = True  # whether a query sees no own key behind its place
    mask: BlockMask | None = None  # of flex_attention, once it is made

    @cached_property
    def spans(self) -> list[KeySpan]:
        """Texts, and padding, of all rows. Waits for the device of `segments`."""
        if self.segments is None:
            return [KeySpan(slice(None), 0, self.length)]
        return [
            KeySpan(slice(row, row + 1), begin, end)
            for row, stretches in enumerate(stretches_of(self.segments))
            for begin, end, _ in stretches
        ]

    @property
    def is_chain(self) -> bool:
        """True for a query alone at its column: products of so little are sums over its few own
        keys, which are faster than many small matrices."""
        return self.slots == 1 and self.num_own > 0

    def hidden_own(self, device: torch.device) -> torch.Tensor:
        """[S, O] True where a query does not see an own key."""
        ahead = self.num_own - self.slots
        back = torch.arange(self.slots, device=device)[:, None] + ahead
        back = back - torch.arange(self.num_own, device=device)
        hidden = back < 0 if self.causal else torch.zeros_like(back, dtype=torch.bool)
        return hidden if self.window is None else hidden | (back >= self.window)

    def parts(self, like: torch.Tensor) -> Iterator[KeyPart]:
        """Parts of the true keys, for queries [B, heads * S, N, D]. The window of each query ends
        with the query."""
        if self.window is None:
            yield from parts_of(self, None, like)
            return
        for slot in range(self.slots):
            for part in parts_of(self, self.window - slot, like):
                rows, _, places = part.queries
                yield part._replace(queries=(rows, slice(slot, None, self.slots), places))


def fused(
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    true: tuple[torch.Tensor, torch.Tensor],
    geometry: Geometry,
) -> torch.Tensor:
    """Scaled queries [B, heads, N * S, D], own keys and values [B, kv_heads, N, O, D], and the true
    ones [B, kv_heads, L, D] -> [B, heads, N * S, D]."""
    by_column = query.unflatten(2, (-1, geometry.slots)).transpose(2, 3).flatten(1, 2)
    # Autocast would take the products with own keys, which are in more digits, for others.
    with autocast(query.device, enabled=False):
        found = _Fused.apply(by_column, *own, *true, geometry)
    return found.unflatten(1, (-1, geometry.slots)).transpose(2, 3).flatten(2, 3)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        true_key: torch.Tensor,
        true_value: torch.Tensor,
        geometry: Geometry,
    ) -> torch.Tensor:
        output, total = _Own(query, key, value, geometry).forward()
        parts = list(geometry.parts(query))
        add_parts(output, total, query, true_key, true_value, parts)
        output = output.to(query.dtype)
        ctx.geometry, ctx.parts = geometry, parts
        ctx.save_for_backward(query, key, value, true_key, true_value, output, total)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, true_key, true_value, output, total = ctx.saved_tensors
        own = _Own(query, key, value, ctx.geometry)
        of_query, *of_own = own.backward(gradient, output, total)
        true = (query, true_key, true_value)
        of_true = add_gradients(of_query, true, gradient, output, total, ctx.parts)
        return *(one.to(query.dtype) for one in (of_query, *of_own, *of_true)), None


def scores_of(rows: torch.Tensor, keys: torch.Tensor, *, is_chain: bool) -> torch.Tensor:
    """[..., R, D] x [..., O, D] -> [..., R, O]."""
    if is_chain:
        each = [(rows * key.unsqueeze(-2)).sum(dim=-1) for key in keys.unbind(-2)]
        return torch.stack(each, dim=-1)
    return rows @ keys.transpose(-1, -2)


def mixed(weights: torch.Tensor, values: torch.Tensor, *, is_chain: bool) -> torch.Tensor:
    """[..., R, O] x [..., O, D] -> [..., R, D]."""
    if is_chain:
        pairs = zip(weights.unbind(-1), values.unbind(-2), strict=True)
        return sum(weight.unsqueeze(-1) * value.unsqueeze(-2) for weight, value in pairs)
    return weights @ values


class _Own:
    """Keys of a query's own column. Queries, outputs and sums are [B, heads * S, N, ...]."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, geometry: Geometry
    ):
        self.precise = torch.promote_types(query.dtype, torch.float32)
        self.slots, self.kv_heads = geometry.slots, key.shape[1]
        self.scores_of = partial(scores_of, is_chain=geometry.is_chain)
        self.mixed = partial(mixed, is_chain=geometry.is_chain)
        self.hidden = geometry.hidden_own(query.device)
        self.query = self._by_column(query)
        self.key, self.value = (one.to(self.precise).contiguous() for one in (key, value))

    def _by_column(self, states: torch.Tensor) -> torch.Tensor:
        """[B, heads * S, N, ...] -> [B, kv_heads, N, G * S, ...]."""
        # Products of many small matrices are one call where each is contiguous.
        by_column = states.to(self.precise).unflatten(1, (self.kv_heads, -1)).transpose(2, 3)
        return by_column.contiguous()

    def _by_head(self, states: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        return states.transpose(2, 3).flatten(1, 2).contiguous()

    def _scores(self) -> torch.Tensor:
        """[B, kv_heads, N, G * S, O]."""
        scores = self.scores_of(self.query, self.key).unflatten(3, (-1, self.slots))
        return scores.masked_fill(self.hidden, -torch.inf).flatten(3, 4)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, heads * S, N, D] and log of the sum of exponentials [B, heads * S, N]."""
        scores = self._scores()
        total = scores.logsumexp(dim=-1)
        output = self.mixed((scores - total[..., None]).exp_(), self.value)
        return self._by_head(output), self._by_head(total)

    def backward(
        self, gradient: torch.Tensor, output: torch.Tensor, total: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the query, keys and values."""
        out = self._by_column(gradient)
        common = (out * self._by_column(output)).sum(dim=-1, keepdim=True)
        weight = (self._scores() - self._by_column(total)[..., None]).exp_()
        of_score = weight * (self.scores_of(out, self.value) - common)
        of_key = self.mixed(of_score.transpose(-1, -2), self.query)
        of_value = self.mixed(weight.transpose(-1, -2), out)
        return self._by_head(self.mixed(of_score, self.key)), of_key, of_value


# Queries of a band of a window.
BAND = 128
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class KeySpan(NamedTuple):
    """Consecutive columns of one text, of one row or of all."""

    rows: slice
    begin: int
    end: int


class KeyPart(NamedTuple):
    """Queries and the true keys that they see, as places in their tensors."""

    queries: tuple[slice, slice, slice]
    keys: tuple[slice, slice, slice]
    causal: bool
    mask: torch.Tensor | None  # [queries, keys], added to scores


def parts_of(geometry: Geometry, window: int | None, like: torch.Tensor) -> Iterator[KeyPart]:
    """No two parts hold the same pair of query and key."""
    step, first = geometry.step, geometry.first
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
