"""Bounds of how far back the queries of a layer look."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

Position = TypeVar("Position", int, torch.Tensor)


class Chunk(NamedTuple):
    """A query sees no key before its own chunk of positions (Llama 4's chunked attention); chunks
    begin at the multiples of `size`."""

    size: int


# A number: that many positions, the query's own the last of them.
Window = int | Chunk


def oldest_seen(window: Window, position: Position) -> Position:
    """The lowest position that queries at `position` see; below zero where they see all."""
    if isinstance(window, Chunk):
        return position // window.size * window.size
    return position - window + 1


def size_of(window: Window | None) -> int:
    """As kernels take it: 0 for none."""
    return window.size if isinstance(window, Chunk) else window or 0
