"""Attention of a ragged batch over a paged pool of keys and values; chain verification is its causal case.

Legend: T tokens of the pass, rows one after another; B rows; L layers; S = num_blocks * block_size slots.
Position p of a row lives in slot `block_tables[row, p // block_size] * block_size + p % block_size`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class PagedPool:
    """Keys and values of every layer. Tensors keep their addresses for the life of the pool."""

    keys: list[torch.Tensor]  # L x [S, kv_heads, key_dim]
    values: list[torch.Tensor]  # L x [S, kv_heads, value_dim]
    block_size: int

    @classmethod
    def empty(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> PagedPool:
        slots = num_blocks * block_size
        # Zeros, not uninitialised memory: a masked slot still meets a zero weight, and 0 * NaN is NaN.
        keys = [torch.zeros(slots, num_kv_heads, key_dim, device=device, dtype=dtype) for _ in range(num_layers)]
        values = [torch.zeros(slots, num_kv_heads, value_dim or key_dim, device=device, dtype=dtype) for _ in range(num_layers)]
        return cls(keys, values, block_size)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class PagedPass:
    """The `AttentionContext` of one forward pass: writes the pass's keys and values to the pool, then attends causally.

    Args:
        pool: where keys and values live; written in place.
        block_tables: [B, max_blocks] int64.
        positions: [T] int64, absolute, ascending within a row; a row's context is everything up to its last position.
        lengths: [B] int64, tokens of each row in this pass, each >= 1; sums to T.
    """

    def __init__(self, pool: PagedPool, block_tables: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor):
        self.pool, self.block_tables, self.positions = pool, block_tables, positions
        size, counts = pool.block_size, lengths.tolist()
        rows = 0 if len(counts) == 1 else torch.repeat_interleave(lengths, output_size=len(positions))
        self.slots = block_tables[rows, positions // size] * size + positions % size
        self._runs = _find_runs(counts, positions)
        self._parts: dict[int | None, list[_Part]] = {}

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
        """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads, value_dim]."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.index_copy_(0, self.slots, key[0].transpose(0, 1).to(keys.dtype))
        values.index_copy_(0, self.slots, value[0].transpose(0, 1).to(values.dtype))
        if sliding_window not in self._parts:
            make = [
                _make_part(run, self.block_tables, self.positions, self.pool.block_size, sliding_window) for run in self._runs
            ]
            self._parts[sliding_window] = make
        outputs = []
        for part in self._parts[sliding_window]:
            q = part.queries(query)
            k, v = part.gather(keys).to(query.dtype), part.gather(values).to(query.dtype)
            if softcap is None and sinks is None:
                out = part.attention(q, k, v, scaling)
            else:
                out = reference_attention(q, k, v, part.visible, scaling=scaling, softcap=softcap, sinks=sinks)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


# Rows of equal length with at most this much context are attended together, padded to the longest.
_SHORT_CONTEXT = 256
# Up to this many queries a head, the heads that share keys are folded into the query dimension.
_FEW_QUERIES = 256


class _Run(NamedTuple):
    """Consecutive rows that are attended in one call: rows of one length, or a row alone."""

    first_row: int
    num_rows: int
    begin: int  # where they start in T
    length: int  # tokens of each row
    context: int  # positions of the longest context


def _find_runs(lengths: list[int], positions: torch.Tensor) -> list[_Run]:
    ends = list(itertools.accumulate(lengths))
    # On a CPU one copy of all positions is cheaper than picking the last ones.
    every = positions.tolist()
    contexts = [every[end - 1] + 1 for end in ends]
    runs: list[_Run] = []
    for row, (length, end, context) in enumerate(zip(lengths, ends, contexts)):
        last = runs[-1] if runs else None
        if last is not None and last.length == length and max(last.context, context) <= _SHORT_CONTEXT:
            runs[-1] = last._replace(num_rows=last.num_rows + 1, context=max(last.context, context))
        else:
            runs.append(_Run(row, 1, end - length, length, context))
    return runs


@dataclass
class _Part:
    """A run with its context resolved to slots; the same for every layer of one window."""

    run: _Run
    slots: torch.Tensor | slice  # [num_rows * n], or a slice where a lone row's blocks lie side by side
    visible: torch.Tensor | None  # [num_rows, 1, length, n] bool; None where every query sees all of the context
    biases: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """[1, heads, T, dim] -> [num_rows, heads, length, dim]."""
        rows, begin, length = self.run.num_rows, self.run.begin, self.run.length
        if rows == 1:
            return query[:, :, begin : begin + length]
        return query[0, :, begin : begin + rows * length].unflatten(1, (rows, length)).transpose(0, 1)

    def gather(self, pool: torch.Tensor) -> torch.Tensor:
        """[S, kv_heads, dim] -> [num_rows, kv_heads, n, dim]."""
        # index_select is several times faster than indexing on a CPU, and a slice costs nothing.
        found = pool[self.slots] if isinstance(self.slots, slice) else pool.index_select(0, self.slots)
        return found.unflatten(0, (self.run.num_rows, -1)).transpose(1, 2)

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        groups, length = query.shape[1] // key.shape[1], query.shape[2]
        if groups == 1 or groups * length > _FEW_QUERIES:
            bias = self._bias(1, query.dtype)
            return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling, enable_gqa=groups > 1)
        # Folding the heads of a group into the queries reads each key once instead of repeating it.
        folded = query.reshape(len(query), key.shape[1], groups * length, -1)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=self._bias(groups, query.dtype), scale=scaling)
        return out.reshape(len(query), query.shape[1], length, -1)

    def _bias(self, repeats: int, dtype: torch.dtype) -> torch.Tensor | None:
        if self.visible is None:
            return None
        if (repeats, dtype) not in self.biases:
            bias = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device).masked_fill_(~self.visible, -math.inf)
            self.biases[repeats, dtype] = bias.repeat(1, 1, repeats, 1)
        return self.biases[repeats, dtype]


def _make_part(run: _Run, block_tables: torch.Tensor, positions: torch.Tensor, block_size: int, window: int | None) -> _Part:
    tokens = positions[run.begin : run.begin + run.num_rows * run.length].view(run.num_rows, run.length, 1)
    # Nobody looks further back than the window of the earliest query of the run.
    start = 0 if window is None else max(0, int(tokens.min()) - window + 1)
    context = torch.arange(start, run.context, device=positions.device)
    table = block_tables[run.first_row : run.first_row + run.num_rows]
    slots = table[:, context // block_size] * block_size + context % block_size
    if run.num_rows > 1:
        # Padding reads slot 0. What an earlier owner left in a row's own blocks could be NaN, and 0 * NaN is NaN.
        slots = torch.where(context <= tokens[:, -1], slots, 0)
    slots = slots.flatten()
    visible = None
    if run.num_rows > 1 or run.length > 1:
        visible = context <= tokens
        if window is not None:
            visible &= tokens - context < window
        visible = visible[:, None]
    return _Part(run, _as_slice(slots) if run.num_rows == 1 else slots, visible)


def _as_slice(slots: torch.Tensor) -> torch.Tensor | slice:
    """Slots that follow one another as a slice. On an accelerator asking would cost a synchronisation, and gathering is cheap."""
    if slots.is_cuda or int(slots[-1] - slots[0]) != len(slots) - 1 or not bool((slots.diff() == 1).all()):
        return slots
    return slice(int(slots[0]), int(slots[-1]) + 1)


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Soft-capped scores (Gemma 2) and per-head sinks: [..., heads, t, dim] x [..., kv_heads, n, dim] -> [..., heads, t, dim].

    `mask` is boolean and broadcasts to [..., heads, t, n]; True where a query may look.
    """
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query @ key.transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sinks is None:
        return torch.softmax(scores.float(), dim=-1).to(value.dtype) @ value
    # A sink is one more logit per head that takes weight and gives no value.
    column = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
    weights = torch.softmax(torch.cat([scores, column], dim=-1).float(), dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value
