"""Attention of a ragged batch over a paged pool of keys and values; a chain is its causal case, a
tree has masks of its own.

Legend: T tokens of the pass, rows one after another; B rows; L layers; S = num_blocks * block_size
slots. Kv index p of a row lives in slot `block_tables[row, p // block_size] * block_size + p %
block_size`. A token's kv index is its position, but for the nodes of a tree: several have one
position, each has a kv index of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from draftsmith.kernels.attention.paged_compiled import CompiledContext
from draftsmith.kernels.attention.paged_torch import GatheredContext
from draftsmith.kernels.attention.pool import PagedPool, PassLayout, Scoring, TreeLayout
from draftsmith.kernels.dispatch import operation

if TYPE_CHECKING:
    from draftsmith.kernels.attention.paged_triton import TritonContext


class PagedPass:
    """The `AttentionContext` of one forward pass: writes the pass's keys and values to the pool,
    then attends.

    Args:
        pool: where keys and values live; written in place.
        block_tables: [B, max_blocks] int64.
        positions: [T] int64, absolute, ascending within a row without a tree; a row's context is
        everything up to its last kv index.
        lengths: [B] int64, tokens of each row in this pass; sums to T. Rows of none come last.
        tree: None when no row is a tree.
        impl: "auto", "triton" or "torch". Triton reads nothing back from the device, so a CUDA
        graph can hold the pass.
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
        self.pool, self.positions = pool, positions
        self.layout = PassLayout(block_tables, positions, lengths, tree)
        self.context = attention_context(pool.keys[0], pool.block_size, self.layout, impl=impl)

    @property
    def slots(self) -> torch.Tensor:
        """[T] int64, where the pass's keys and values are written."""
        return self.context.slots

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] -> [1, T, heads,
        value_dim]."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        context, new = self.context, (key, value)
        if isinstance(context, CompiledContext) and context.takes(query, new, keys, values, rule):
            return context.attend(query, keys, values, rule, new).unsqueeze(0)
        keys.index_copy_(0, self.slots, key[0].transpose(0, 1).to(keys.dtype))
        values.index_copy_(0, self.slots, value[0].transpose(0, 1).to(values.dtype))
        return context.attend(query, keys, values, rule).unsqueeze(0)


@operation
def attention_context(
    keys: torch.Tensor, block_size: int, layout: PassLayout, *, impl: str = "auto"
) -> GatheredContext | TritonContext:
    """Context of a pass over a pool with such `keys`."""
    return GatheredContext(block_size, layout)
