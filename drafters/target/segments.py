"""Several texts in one row of a batch, none of which sees another: which token belongs to which,
and what follows from it.

`segments` [B, L] numbers the texts of each row from 0 on, left to right; padding is -1. None means
one text a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


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
