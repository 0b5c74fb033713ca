"""The paged pool of keys and values, the layout of one pass over it, and how far back queries of a
layer look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch


class LayerShape(NamedTuple):
    num_heads: int  # of keys and values
    key_dim: int
    value_dim: int


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
        shape = LayerShape(num_kv_heads, key_dim, value_dim or key_dim)
        return cls.of_layers([shape] * num_layers, num_blocks, block_size, device, dtype)

    @classmethod
    def of_layers(
        cls,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> PagedPool:
        """Room for `num_blocks * block_size` positions of every layer."""
        slots = num_blocks * block_size

        # Zeros, not uninitialised memory: a masked slot still meets a zero weight, and 0 * NaN is
        # NaN.
        def zeros(num_heads: int, dim: int) -> torch.Tensor:
            return torch.zeros(slots, num_heads, dim, device=device, dtype=dtype)

        keys = [zeros(shape.num_heads, shape.key_dim) for shape in shapes]
        values = [zeros(shape.num_heads, shape.value_dim) for shape in shapes]
        return cls(keys, values, block_size)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def slots_of(
        self, block_tables: torch.Tensor, rows: torch.Tensor | int, kv_indices: torch.Tensor
    ) -> torch.Tensor:
        """`kv_indices` [n] of `rows` [n] of `block_tables` [B, max_blocks] -> [n] int64."""
        return slots_of(self.block_size, block_tables, rows, kv_indices)

    def move_slots(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy keys and values of slots `sources` [n] to `slots` [n] in every layer; the two may
        overlap, but no two of `slots` are equal."""
        for tensor in (*self.keys, *self.values):
            # All is read before anything is written.
            tensor.index_copy_(0, slots, tensor.index_select(0, sources))


def slots_of(
    size: int, block_tables: torch.Tensor, rows: torch.Tensor | int, kv_indices: torch.Tensor
) -> torch.Tensor:
    """As `PagedPool.slots_of`, of blocks of `size` positions."""
    return block_tables[rows, kv_indices // size] * size + kv_indices % size


class TreeLayout(NamedTuple):
    """Kv indices and visibility of the tokens of a pass in which some rows are trees. Without it kv
    indices are positions.

    A node's position is its depth in the tree, which rotary embeddings and sliding windows go by.
    """

    kv_indices: torch.Tensor  # [T] int64, consecutive within a row
    # [T] int64, bit j: sees kv index first + j (its own bit is its highest); -1: sees all up to its
    # own
    ancestors: torch.Tensor
    # [T] int64: all kv indices before it are seen; not read where `ancestors` is -1
    first: torch.Tensor


class PassLayout(NamedTuple):
    """Tokens of a pass and the blocks of their rows; see `PagedPass`."""

    block_tables: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    tree: TreeLayout | None = None

    @property
    def kv_indices(self) -> torch.Tensor:
        return self.positions if self.tree is None else self.tree.kv_indices


Position = TypeVar("Position", int, torch.Tensor)


class Chunk(NamedTuple):
    """A query sees no key before its own chunk of positions (Llama 4's chunked attention); chunks
    begin at the multiples of `size`."""

    size: int


# A number: that many positions, the query's own the last of them.
Window = int | Chunk


class Scoring(NamedTuple):
    """Weight of keys for the queries of a layer."""

    scaling: float
    window: Window | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads], logits without a key

    @property
    def has_plain_scores(self) -> bool:
        return self.softcap is None and self.sinks is None


def oldest_seen(window: Window, position: Position) -> Position:
    """The lowest position that queries at `position` see; below zero where they see all."""
    if isinstance(window, Chunk):
        return position // window.size * window.size
    return position - window + 1


def size_of(window: Window | None) -> int:
    """As kernels take it: 0 for none."""
    return window.size if isinstance(window, Chunk) else window or 0
