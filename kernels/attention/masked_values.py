"""Attention in which a masked value that is not finite does not matter: 0 * NaN is NaN, so a weight
of zero does not mask it.

A target may overflow behind a token that it would never choose. Where a draft offers that token,
the other positions of the row must not notice.
"""

from __future__ import annotations

import math

import torch


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
