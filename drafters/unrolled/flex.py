"""Attention of training passes on a CUDA device by torch's `flex_attention`, whose compiled kernel
skips tiles that no query sees and keeps no scores."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from threading import Event
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from draftsmith.kernels.dispatch import pins

log = logging.getLogger(__name__)

# (row, head, query, key), tensors of indices -> True where the query sees the key.
Sees = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Variants by depth, window and shape; one more would run uncompiled, with all scores in memory.
RECOMPILES = 64
# torch's other kernel, which it takes for fewer than 128 queries, has no tile for these masks
# (torch 2.11: "No choices to select").
KERNEL = {"BACKEND": "TRITON"}
# Head width that Inductor compiles it for at least.
NARROWEST = 16

_limit_reached = Event()


class LimitReached(Exception):
    """torch would run it uncompiled from now on."""


def can_flex(query: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        pins(query.device)
        and min(query.shape[-1], value.shape[-1]) >= NARROWEST
        and not _limit_reached.is_set()
    )


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled; raises `LimitReached`."""
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    limits = {
        "recompile_limit": RECOMPILES,
        "accumulated_recompile_limit": 4 * RECOMPILES,
        "fail_on_recompile_limit_hit": True,
    }
    compiled = torch.compile(function)

    @wraps(function)
    def limited(*given: Any, **named: Any) -> Any:
        try:
            with config.patch(limits):
                return compiled(*given, **named)
        except FailOnRecompileLimitHit as error:
            if not _limit_reached.is_set():
                log.warning(
                    "flex_attention was compiled %d times; attention over long texts is computed "
                    "in chunks from now on",
                    RECOMPILES,
                )
            _limit_reached.set()
            raise LimitReached from error

    return limited


def _fitting(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    return _compiled(function) if pins(device) else function


def block_mask(sees: Sees, rows: int | None, queries: torch.Tensor, keys: int) -> BlockMask:
    """Mask of all heads; of all rows alike where `rows` is None. Raises `LimitReached`."""
    device = queries.device
    # Compiled, it keeps no entry for each pair.
    make = _fitting(create_block_mask, device)
    return make(sees, rows, None, queries.shape[2], keys, device=device)


def flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask
) -> torch.Tensor:
    """Scaled queries [B, heads, N, D] -> [B, heads, N, value dim]. Raises `LimitReached`."""
    attend = _fitting(flex_attention, query.device)
    return attend(
        query, key, value, block_mask=mask, scale=1.0, enable_gqa=True, kernel_options=KERNEL
    )
