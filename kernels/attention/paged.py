"""Attention of a ragged batch over a paged pool of keys and values; a chain is its causal case, a tree has masks of its own.

Legend: T tokens of the pass, rows one after another; B rows; L layers; S = num_blocks * block_size slots.
Place p of a row lives in slot `block_tables[row, p // block_size] * block_size + p % block_size`. A token's place is its
position, but for the nodes of a tree: several have one position, each has a place of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from draftsmith.kernels.attention.paged_torch import GatheredContext
from draftsmith.kernels.dispatch import choose

if TYPE_CHECKING:
    from draftsmith.kernels.attention.paged_triton import TritonContext

NULL_BLOCK = 0  # nobody's: what is written there is never read, see serve/cache/blocks.py, which knows no torch


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

    def slots_of(self, block_tables: torch.Tensor, rows: torch.Tensor | int, places: torch.Tensor) -> torch.Tensor:
        """`places` [n] of `rows` [n] of `block_tables` [B, max_blocks] -> [n] int64."""
        size = self.block_size
        return block_tables[rows, places // size] * size + places % size

    def move(self, block_table: torch.Tensor, sources: torch.Tensor, places: torch.Tensor) -> None:
        """Copies keys and values of a row's places `sources` [n] to `places` [n] in every layer; the two may overlap."""
        tables = block_table[None]
        self.move_slots(self.slots_of(tables, 0, sources), self.slots_of(tables, 0, places))

    def move_slots(self, sources: torch.Tensor, slots: torch.Tensor) -> None:
        """The same for slots [n] of any rows; no two of `slots` are equal."""
        for tensor in (*self.keys, *self.values):
            # All is read before anything is written.
            tensor.index_copy_(0, slots, tensor.index_select(0, sources))


class TreeLayout(NamedTuple):
    """Where the tokens of a pass keep their keys and what they see, when some rows are trees. Without it places are positions.

    A node's position is its depth in the tree, which rotary embeddings and sliding windows go by.
    """

    places: torch.Tensor  # [T] int64, consecutive within a row
    ancestors: (
        torch.Tensor
    )  # [T] int64, bit j: sees place first + j (its own bit is its highest); -1: sees all places up to its own
    first: torch.Tensor  # [T] int64: all places before it are seen; not read where `ancestors` is -1


class PassLayout(NamedTuple):
    """Which tokens a pass holds and where their rows keep keys; see `PagedPass`."""

    block_tables: torch.Tensor
    lengths: torch.Tensor
    tree: TreeLayout | None


class PagedPass:
    """The `AttentionContext` of one forward pass: writes the pass's keys and values to the pool, then attends.

    Args:
        pool: where keys and values live; written in place.
        block_tables: [B, max_blocks] int64.
        positions: [T] int64, absolute, ascending within a row without a tree; a row's context is everything up to its last place.
        lengths: [B] int64, tokens of each row in this pass, each >= 1; sums to T.
        tree: None when no row is a tree.
        impl: "auto", "triton" or "torch". With Triton nothing is read back from the device, so a CUDA graph can hold the pass.
    """

    def __init__(
        self,
        pool: PagedPool,
        block_tables: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        *,
        tree: TreeLayout | None = None,
        impl: str = "auto",
    ):
        self.pool = pool
        self.layout = PassLayout(block_tables, lengths, tree)
        places = positions if tree is None else tree.places
        rows = 0 if len(lengths) == 1 else torch.repeat_interleave(lengths, output_size=len(positions))
        self.slots = pool.slots_of(block_tables, rows, places)
        self.context = _context(impl, pool.keys[0])(pool.block_size, block_tables, positions, lengths, tree)

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
        out = self.context.attend(query, keys, values, scaling=scaling, window=sliding_window, softcap=softcap, sinks=sinks)
        return out.unsqueeze(0)


def _context(impl: str, keys: torch.Tensor) -> Callable[..., GatheredContext | TritonContext]:
    """How the passes of a pool attend."""
    if choose(impl, keys.device, keys.dtype) == "torch":
        return GatheredContext
    from draftsmith.kernels.attention.paged_triton import TritonContext

    return TritonContext.of
