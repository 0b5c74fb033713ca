"""Paged attention in plain torch, the CPU's way and the reference: rows are gathered out of the
pool and attended by SDPA.

Legend as in `paged_attention.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.kernels.attention.pool import PassLayout, Scoring, Window, oldest_seen, slots_of
from draftsmith.kernels.dispatch import reads_freely

NUM_BITS = 63  # of a tree's `ancestors`; the sign is not one of them
# Rows of equal length with at most this much context are attended together, padded to the longest.
_SHORT_CONTEXT = 256
# Up to this many queries per head, the heads that share keys are folded into the query dimension.
_FEW_QUERIES = 256
# Longer rows are attended in pieces of so many tokens: a mask of a whole long text would take its
# length squared.
_MOST_QUERIES = 2048


class _Run(NamedTuple):
    """Consecutive rows that are attended in one call: rows of one length, a row alone, or a piece
    of a long row."""

    first_row: int
    num_rows: int
    begin: int  # where they start in T
    length: int  # tokens of each row
    context: int  # kv indices of the longest context


def _find_runs(lengths: list[int], kv_indices: torch.Tensor) -> list[_Run]:
    ends = list(itertools.accumulate(lengths))
    # On a CPU one copy of all kv indices is cheaper than picking the last ones.
    every = kv_indices.tolist()
    contexts = [every[end - 1] + 1 for end in ends]
    runs: list[_Run] = []
    for row, (length, end, context) in enumerate(zip(lengths, ends, contexts)):
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.length == length
            and max(last.context, context) <= _SHORT_CONTEXT
        ):
            runs[-1] = last._replace(num_rows=last.num_rows + 1, context=max(last.context, context))
        else:
            for begin in range(end - length, end, _MOST_QUERIES):
                last_one = min(begin + _MOST_QUERIES, end)
                runs.append(_Run(row, 1, begin, last_one - begin, every[last_one - 1] + 1))
    return runs


@dataclass
class _Part:
    """A run with its context resolved to slots; the same for every layer of one window."""

    run: _Run
    # [num_rows * n], or a slice where a lone row's blocks lie side by side
    slots: torch.Tensor | slice
    # [num_rows, 1, length, n] bool; None where every query sees all of the context
    visible: torch.Tensor | None
    biases: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """[1, heads, T, dim] -> [num_rows, heads, length, dim]."""
        rows, begin, length = self.run.num_rows, self.run.begin, self.run.length
        if rows == 1:
            return query[:, :, begin : begin + length]
        return (
            query[0, :, begin : begin + rows * length].unflatten(1, (rows, length)).transpose(0, 1)
        )

    def gather(self, pool: torch.Tensor) -> torch.Tensor:
        """[S, kv_heads, dim] -> [num_rows, kv_heads, n, dim]."""
        # index_select is several times faster than indexing on a CPU, and a slice costs nothing.
        found = (
            pool[self.slots] if isinstance(self.slots, slice) else pool.index_select(0, self.slots)
        )
        if self.run.num_rows == 1:
            return found.transpose(0, 1).unsqueeze(0)
        return found.view(self.run.num_rows, -1, *found.shape[1:]).transpose(1, 2)

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        groups, length = query.shape[1] // key.shape[1], query.shape[2]
        if groups == 1 or groups * length > _FEW_QUERIES:
            bias = self._bias(1, query.dtype)
            return scaled_dot_product_attention(
                query, key, value, attn_mask=bias, scale=scaling, enable_gqa=groups > 1
            )
        # Folding the heads of a group into the queries reads each key once instead of repeating it.
        folded = query.reshape(len(query), key.shape[1], groups * length, -1)
        out = scaled_dot_product_attention(
            folded, key, value, attn_mask=self._bias(groups, query.dtype), scale=scaling
        )
        return out.reshape(len(query), query.shape[1], length, -1)

    def _bias(self, repeats: int, dtype: torch.dtype) -> torch.Tensor | None:
        if self.visible is None:
            return None
        if (repeats, dtype) not in self.biases:
            bias = torch.zeros(
                self.visible.shape, dtype=dtype, device=self.visible.device
            ).masked_fill_(~self.visible, -math.inf)
            self.biases[repeats, dtype] = bias.repeat(1, 1, repeats, 1)
        return self.biases[repeats, dtype]


class GatheredContext:
    """Keys and masks of the tokens of one pass, worked out once per window and shared by its
    layers."""

    def __init__(self, block_size: int, layout: PassLayout):
        self.block_size, self.kv_indices = block_size, layout.kv_indices
        self.block_tables, self.positions, lengths, self.tree = layout
        self._lengths, self._row_lengths = lengths, lengths.tolist()
        # Masks of pieces of long rows are made again in each layer rather than kept together.
        self._keeps = max(self._row_lengths, default=0) < _MOST_QUERIES
        self._parts: dict[tuple[Window | None, int], list[_Part]] = {}

    @cached_property
    def slots(self) -> torch.Tensor:
        """[T] int64, where the pass's keys and values are written."""
        rows: torch.Tensor | int = 0
        if len(self._lengths) > 1:
            rows = torch.repeat_interleave(self._lengths, output_size=len(self.kv_indices))
        return slots_of(self.block_size, self.block_tables, rows, self.kv_indices)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        """query [1, heads, T, dim]; keys and values [S, kv_heads, dim], the pass's own among them
        -> [T, heads, value_dim]."""
        outputs = [
            self._attend_part(part, query, keys, values, rule)
            for part in self._parts_of(rule.window)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_part(
        self,
        part: _Part,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: Scoring,
    ) -> torch.Tensor:
        """Arguments as `attend`'s -> [tokens of the part, heads, value_dim]."""
        q = part.queries(query)
        k, v = part.gather(keys).to(query.dtype), part.gather(values).to(query.dtype)
        if rule.has_plain_scores:
            out = part.attention(q, k, v, rule.scaling)
        else:
            out = reference_attention(q, k, v, part.visible, rule)
        if part.visible is not None and not all_finite(out):
            out = _unspoiled(out, q, k, v, part.visible, rule)
        return out.transpose(1, 2).flatten(0, 1)

    @cached_property
    def _runs(self) -> list[_Run]:
        return _find_runs(self._row_lengths, self.kv_indices)

    def _parts_of(self, window: Window | None, beyond: int = 0) -> Iterable[_Part]:
        """Parts of the rows of more than `beyond` tokens."""
        runs = (run for run in self._runs if self._row_lengths[run.first_row] > beyond)
        if not self._keeps:
            return (self._make_part(run, window) for run in runs)
        if (window, beyond) not in self._parts:
            self._parts[window, beyond] = [self._make_part(run, window) for run in runs]
        return self._parts[window, beyond]

    def _make_part(self, run: _Run, window: Window | None) -> _Part:
        tokens = slice(run.begin, run.begin + run.num_rows * run.length)
        shape = (run.num_rows, run.length, 1)
        if run.num_rows == run.length == 1 and self.tree is None:
            # A lone token sees all of its window; single-row decoding is nothing else.
            start = 0 if window is None else max(0, oldest_seen(window, run.context - 1))
            if (found := self._neighbours(run, start)) is not None:
                return _Part(run, found, None)
        kv_indices, positions = (
            self.kv_indices[tokens].view(shape),
            self.positions[tokens].view(shape),
        )
        # No query looks further back than the window of the earliest query of the run.
        start = 0 if window is None else max(0, oldest_seen(window, int(positions.min())))
        context = torch.arange(start, run.context, device=kv_indices.device)
        slots = self._neighbours(run, start)
        if slots is None:
            slots = self._slots(run, context, kv_indices)
        visible = None
        if self.tree is not None:
            ancestors, first = (
                self.tree.ancestors[tokens].view(shape),
                self.tree.first[tokens].view(shape),
            )
            visible = _tree_sight(context, kv_indices, positions, ancestors, first, window)[:, None]
        elif run.num_rows > 1 or run.length > 1:
            visible = context <= kv_indices
            if window is not None:
                visible &= context >= oldest_seen(window, positions)
            visible = visible[:, None]
        return _Part(run, slots, visible)

    def _neighbours(self, run: _Run, start: int) -> slice | None:
        """The slots of a lone row's kv indices from `start` on, if its blocks lie side by side."""
        # On an accelerator asking would cost a synchronisation, and gathering is cheap.
        if run.num_rows > 1 or not reads_freely(self.block_tables.device):
            return None
        size = self.block_size
        blocks = self.block_tables[run.first_row, start // size : -(-run.context // size)].tolist()
        if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
            return None
        begin = blocks[0] * size + start % size
        return slice(begin, begin + run.context - start)

    def _slots(self, run: _Run, context: torch.Tensor, kv_indices: torch.Tensor) -> torch.Tensor:
        """[num_rows * n], of the kv indices `context` [n] of every row."""
        size = self.block_size
        table = self.block_tables[run.first_row : run.first_row + run.num_rows]
        slots = table[:, context // size] * size + context % size
        if run.num_rows > 1:
            # Padding reads slot 0. What an earlier owner left in a row's own blocks could be NaN,
            # and 0 * NaN is NaN.
            slots = torch.where(context <= kv_indices[:, -1], slots, 0)
        return slots.flatten()


def _unspoiled(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    rule: Scoring,
) -> torch.Tensor:
    """`out` with its rows that are not finite computed again, so that what is not finite reaches
    only queries that see it."""
    rows = spoiled_rows(out)
    q, k, v, mask = query[rows], key[rows], value[rows], visible[rows]
    again = reference_attention(q, k, without_spoiled(v), mask, rule)
    return out.index_copy(0, rows, spoil(again, v, mask).to(out.dtype))


def _tree_sight(
    context: torch.Tensor,
    kv_indices: torch.Tensor,
    positions: torch.Tensor,
    ancestors: torch.Tensor,
    first: torch.Tensor,
    window: Window | None,
) -> torch.Tensor:
    """Kv indices `context` [n] seen by tokens [rows, length, 1] -> [rows, length, n] bool."""
    index = context - first
    # [rows, length, NUM_BITS]
    bits = (ancestors >> torch.arange(NUM_BITS, device=context.device)) & 1
    node = index.clamp(0, NUM_BITS - 1)
    plain = ancestors == -1
    visible = torch.where(
        plain,
        context <= kv_indices,
        (index < 0) | ((index < NUM_BITS) & (bits.gather(-1, node) == 1)),
    )
    if window is None:
        return visible
    # Positions of a path follow one another: the distance to an ancestor is the number of bits
    # above its own.
    above = bits.flip(-1).cumsum(-1).flip(-1) - bits
    places = torch.where(plain | (index < 0), context, positions - above.gather(-1, node))
    return visible & (places >= oldest_seen(window, positions))


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    rule: Scoring,
) -> torch.Tensor:
    """Soft-capped scores (Gemma 2) and per-head sinks: [..., heads, t, dim] x [..., kv_heads, n,
    dim] -> [..., heads, t, dim].

    `mask` is boolean and broadcasts to [..., heads, t, n]; True where a query may look, whatever
    the window of `rule`.
    """
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query @ key.transpose(-1, -2)) * rule.scaling
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if rule.sinks is None:
        return torch.softmax(scores.float(), dim=-1).to(value.dtype) @ value
    # A sink is one more logit per head that takes weight and gives no value.
    column = rule.sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
    weights = torch.softmax(torch.cat([scores, column], dim=-1).float(), dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value


def all_finite(tensor: torch.Tensor) -> bool:
    """One reduction; waits for the device."""
    return math.isfinite(tensor.sum(dtype=torch.float32).item())


def spoiled_rows(out: torch.Tensor) -> torch.Tensor:
    """[n] int64, the rows of `out` [rows, ...] that hold a value that is not finite."""
    return (~torch.isfinite(out).flatten(1).all(dim=1)).nonzero()[:, 0]


def without_spoiled(value: torch.Tensor) -> torch.Tensor:
    """`value` [..., n, dim] with zeros in place of vectors that are not finite."""
    return value.masked_fill(~_is_finite(value)[..., None], 0)


def spoil(out: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """NaN for the queries that may look at a vector of `value` that is not finite.

    Args:
        out: [rows, heads, t, dim], computed with `without_spoiled(value)`.
        value: [rows, kv_heads, n, dim].
        mask: [rows, 1, t, n] bool, True where a query may look.
    """
    seen = (mask & ~_is_finite(value)[:, :, None]).any(dim=-1)  # [rows, kv_heads, t]
    seen = seen.repeat_interleave(out.shape[1] // value.shape[1], dim=1)
    return out.masked_fill(seen[..., None], math.nan)


def _is_finite(value: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(value).all(dim=-1)
