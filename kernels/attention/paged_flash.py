"""Paged attention by FlashAttention-3 where it is installed. Never run here: the tests put a
reference in the library's place.

The pool is the library's paged layout as it is, [blocks, block_size, kv_heads, dim]. Nothing is
read back from the device, so that a CUDA graph can hold the pass. Legend as in `paged.py`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged_triton import TritonContext
from draftsmith.kernels.attention.pool import Chunk, Window
from draftsmith.kernels.dispatch import FLASH_MODULE, on_its_device

_MOST_DIM = 256
_UNEQUAL_DIMS = [(192, 128)]  # of keys and values


@cache
def _library() -> Any:
    return importlib.import_module(FLASH_MODULE)


@dataclass(frozen=True)
class FlashContext:
    """Layout of a pass without trees as the library takes it."""

    block_size: int
    page_table: torch.Tensor  # [B, max_blocks] int32
    starts: torch.Tensor  # [B + 1] int32, where each row starts in T
    contexts: torch.Tensor  # [B] int32, kv indices of each row with the pass's own
    most_tokens: int  # of a row, known from shapes
    # Attends where the library cannot; None: that raises.
    other: TritonContext | None

    @classmethod
    def of(
        cls,
        block_size: int,
        block_tables: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        *,
        may_fall_back: bool,
    ) -> FlashContext:
        other = TritonContext.of(block_size, block_tables, positions, lengths, None)
        return cls(
            block_size,
            block_tables.int().contiguous(),
            other.starts.int(),
            (positions.index_select(0, other.starts[1:] - 1) + 1).int(),
            len(positions) - len(lengths) + 1,
            other if may_fall_back else None,
        )

    @on_its_device
    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        window: Window | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `TritonContext.attend`. Raises a `UserError` for what the library does not take."""
        obstacle = _obstacle(query, keys, values, window, sinks)
        if obstacle and self.other is None:
            raise UserError(f"impl 'flash' cannot attend {obstacle}; use impl 'triton'")
        if obstacle and self.other is not None:
            return self.other.attend(
                query, keys, values, scaling=scaling, window=window, softcap=softcap, sinks=sinks
            )
        out: torch.Tensor = _library().flash_attn_with_kvcache(
            query[0].transpose(0, 1).contiguous(),
            *(pool.unflatten(0, (-1, self.block_size)) for pool in (keys, values)),
            cache_seqlens=self.contexts,
            page_table=self.page_table,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.most_tokens,
            softmax_scale=scaling,
            causal=True,  # the last token of a row sees its whole context
            window_size=(window - 1, 0) if isinstance(window, int) else (-1, -1),
            softcap=softcap or 0.0,
        )
        return out


def _obstacle(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: Window | None,
    sinks: torch.Tensor | None,
) -> str:
    """Reason why the library cannot attend; empty when it can."""
    key_dim, value_dim = keys.shape[-1], values.shape[-1]
    if sinks is not None:
        return "with sinks"
    if isinstance(window, Chunk):
        return "in chunks"
    if not query.dtype == keys.dtype == values.dtype:
        return f"queries of {query.dtype} over keys of {keys.dtype}"
    if (key_dim, value_dim) in _UNEQUAL_DIMS:
        return ""
    if key_dim != value_dim or key_dim > _MOST_DIM or key_dim % 8:
        return f"heads of {key_dim} and {value_dim} dimensions"
    return ""
