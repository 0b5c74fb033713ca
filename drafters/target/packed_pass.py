"""Block-diagonal causal attention: the texts of a packed row are attended one after another, each
as if it stood alone.

Text by text, because a mask over whole rows computes L * L scores to use a small part of them, and
because it is plain causal attention then, for which the fast kernels are made. Where a window, a
soft cap or sinks need a mask, queries attend in bands, whose masks do not grow with the square of
the length. Legend: B rows, L columns, D width of a head.

`segments` [B, L] says which token belongs to which text: it numbers the texts of each row from 0
on, left to right; padding is -1. None means one text a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.drafters.quirks.recurrent_states import Split, TextPiece
from draftsmith.kernels.attention.paged_torch import reference_attention
from draftsmith.kernels.attention.pool import Chunk, Scoring

# Queries of a band.
BAND = 128


class PackedPass:
    """An `AttentionContext` for a model's forward over `segments` [B, L]; its `position_ids` must
    restart in every text."""

    def __init__(self, segments: torch.Tensor):
        self.rows = stretches_of(segments)
        self.device = segments.device

    @cached_property
    def split(self) -> Split:
        """Texts from their beginning, for layers with a state."""
        texts = [
            TextPiece(row, begin, end, None, None)
            for row, stretches in enumerate(self.rows)
            for begin, end, is_text in stretches
            if is_text
        ]
        return Split([texts], None, self.device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        # Under autocast the rotated queries and keys come wider than the values.
        query, key = query.to(value.dtype), key.to(value.dtype)
        outputs = []
        for row, stretches in enumerate(self.rows):
            parts = []
            for begin, end, is_text in stretches:
                q, k, v = (states[row : row + 1, :, begin:end] for states in (query, key, value))
                if not is_text:
                    parts.append(q.new_zeros(*q.shape[:-1], v.shape[-1]))
                elif isinstance(rule.window, Chunk):
                    # Each chunk is a text of its own.
                    pieces = (x.split(rule.window.size, dim=2) for x in (q, k, v))
                    for one, keys, values in zip(*pieces, strict=True):
                        parts.append(_attend(one, keys, values, rule, None))
                else:
                    parts.append(_attend(q, k, v, rule, rule.window))
            outputs.append(torch.cat(parts, dim=2))
        return torch.cat(outputs).transpose(1, 2)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring, window: int | None
) -> torch.Tensor:
    """One text: [1, heads, n, D] x [1, kv_heads, n, D] -> [1, heads, n, D]."""
    length = query.shape[2]
    if window is not None and window >= length:
        window = None  # it hides nothing
    if rule.has_plain_scores and window is None:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=rule.scaling, enable_gqa=True
        )
    width, parts = window or length, []
    for band in bands(0, length, width, BAND):
        part = query[:, :, band.begin : band.end]
        keys, values = (states[:, :, band.first : band.end] for states in (key, value))
        mask = band_mask(band, width, query.device)
        parts.append(
            scaled_dot_product_attention(
                part, keys, values, attn_mask=mask, scale=rule.scaling, enable_gqa=True
            )
            if rule.has_plain_scores
            else reference_attention(part, keys, values, mask, rule)
        )
    return torch.cat(parts, dim=2)


class Stretch(NamedTuple):
    """Consecutive columns of one text."""

    begin: int
    end: int
    is_text: bool  # False for padding


def begins_of(segments: torch.Tensor) -> torch.Tensor:
    """[B, L] the column at which each token's text begins."""
    columns = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    changed = torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    return torch.where(changed, columns, 0).cummax(dim=1).values


def positions_of(segments: torch.Tensor) -> torch.Tensor:
    """[B, L] of each token in its own text, from 0 on."""
    return torch.arange(segments.shape[1], device=segments.device) - begins_of(segments)


def stretches_of(segments: torch.Tensor) -> list[list[Stretch]]:
    """Texts and padding of every row, in order."""
    rows = []
    for numbers in segments.tolist():
        begins = [at for at in range(len(numbers)) if at == 0 or numbers[at] != numbers[at - 1]]
        ends = [*begins[1:], len(numbers)]
        rows.append(
            [
                Stretch(begin, end, numbers[begin] >= 0)
                for begin, end in zip(begins, ends, strict=True)
            ]
        )
    return rows


def chunks(first: int, length: int, size: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the columns from `first` to `length`, cut at the multiples of `size`."""
    for begin in range(first - first % size, length, size):
        yield max(begin, first), min(begin + size, length)


class Sight(NamedTuple):
    """The columns that the queries of a chunk of columns may look back to."""

    first: int  # none of them sees a column before this one
    # [B, C] each sees none before its own; None when `first` says it all
    begins: torch.Tensor | None
    window: int | None = None  # each sees so many columns at most, its own among them


class Sights:
    """Sights of all chunks of `size` columns."""

    def __init__(self, segments: torch.Tensor | None, size: int):
        self.size = size
        self.begins = None if segments is None else begins_of(segments)
        # Begins only rise along a row.
        self.firsts = None if self.begins is None else self.begins[:, ::size].amin(dim=0).tolist()

    def of(self, begin: int, end: int, window: int | None = None) -> Sight:
        """Sight of these columns, all of one chunk."""
        first = 0 if window is None else max(0, begin - window + 1)
        if self.begins is None or self.firsts is None:
            return Sight(first, None, window)
        first = max(first, self.firsts[begin // self.size])
        return Sight(first, self.begins[:, begin:end], window)


class Band(NamedTuple):
    """Columns of queries, and those of all keys that any of them sees."""

    begin: int
    end: int
    first: int  # keys of the columns from here to `end`


def bands(begin: int, end: int, width: int, size: int) -> Iterator[Band]:
    """Bands of `size` queries of a text's columns, each of which sees `width` columns, its own the
    last of them."""
    for low in range(begin, end, size):
        yield Band(low, min(low + size, end), max(begin, low - width + 1))


def band_mask(band: Band, width: int, device: torch.device) -> torch.Tensor:
    """[queries, keys], True where a query sees a key."""
    ahead = band.begin - band.first
    seen = torch.ones(band.end - band.begin, band.end - band.first, dtype=torch.bool, device=device)
    return seen.tril(ahead).triu(ahead - width + 1)
