"""Rotary embeddings in Triton. For attention over a paged pool one launch does all that comes
before it: RMS norms of queries and keys where a model has them, the rotation, and the write of keys
and values into the pool.

Program (token, head): heads of the query first, then those of the key, then those of the value.
Legend: T tokens, D width of a head of query and key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device
from draftsmith.kernels.forward.norm_triton import Norm, norm_constants, weighted


class HeadNorms(NamedTuple):
    """RMS norms of the heads of query and key before their rotation; weights [D]."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float
    offset: float = 0.0
    wide: bool = False


@triton.jit
def _turn(
    head,  # [D]
    cosine,  # [D]
    sine,  # [D]
    weight,  # [D]
    out,  # [D], written
    eps,
    DIM: tl.constexpr,  # D
    HALF: tl.constexpr,  # D / 2 or the next power of two
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
):
    """head * cosine + (the halves of head exchanged, the first negated) * sine, rounded as three
    operations do."""
    dtype = head.dtype.element_ty
    at = tl.arange(0, HALF)
    inside = at < DIM // 2
    far = at + DIM // 2
    low = tl.load(head + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(head + far, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)
        scale = tl.rsqrt(squares / DIM + eps)
        low = weighted(low * scale, weight, at, inside, dtype, OFFSET, WIDE)
        high = weighted(high * scale, weight, far, inside, dtype, OFFSET, WIDE)
    cosine_low = tl.load(cosine + at, mask=inside, other=0.0).to(tl.float32)
    cosine_high = tl.load(cosine + far, mask=inside, other=0.0).to(tl.float32)
    sine_low = tl.load(sine + at, mask=inside, other=0.0).to(tl.float32)
    sine_high = tl.load(sine + far, mask=inside, other=0.0).to(tl.float32)
    first = (low * cosine_low).to(dtype).to(tl.float32)
    first -= (high * sine_low).to(dtype).to(tl.float32)
    second = (high * cosine_high).to(dtype).to(tl.float32)
    second += (low * sine_high).to(dtype).to(tl.float32)
    # A pool may hold another type than the model computes in.
    tl.store(out + at, first.to(dtype).to(out.dtype.element_ty), mask=inside)
    tl.store(out + far, second.to(dtype).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    query,
    key,
    value,
    cosine,  # [T, D]
    sine,  # [T, D]
    query_weight,  # [D]
    key_weight,  # [D]
    slots,  # [T] int64
    turned,  # [T, HEADS, D], written
    keys,  # [slots, KV_HEADS, D], written
    values,  # [slots, KV_HEADS, VALUE_DIM], written
    query_head_stride,
    query_token_stride,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,  # 0: only the query
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cosines, sines = cosine + token * DIM, sine + token * DIM
    if head < HEADS:
        _turn(
            query + token * query_token_stride + head * query_head_stride,
            cosines, sines, query_weight,
            turned + (token * HEADS + head) * DIM,
            eps, DIM, HALF, HAS_NORM, OFFSET, WIDE,
        )  # fmt: skip
    elif head < HEADS + KV_HEADS:
        head -= HEADS
        _turn(
            key + token * key_token_stride + head * key_head_stride,
            cosines, sines, key_weight,
            keys + (tl.load(slots + token) * KV_HEADS + head) * DIM,
            eps, DIM, HALF, HAS_NORM, OFFSET, WIDE,
        )  # fmt: skip
    else:
        head -= HEADS + KV_HEADS
        at = tl.arange(0, VALUE_WIDTH)
        inside = at < VALUE_DIM
        begin = value + token * value_token_stride + head * value_head_stride
        place = (tl.load(slots + token) * KV_HEADS + head) * VALUE_DIM
        numbers = tl.load(begin + at, mask=inside, other=0.0)
        tl.store(values + place + at, numbers.to(values.dtype.element_ty), mask=inside)


def rotate(
    x: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    weight: torch.Tensor | None = None,
    norm: Norm | None = None,
) -> torch.Tensor:
    """x * cosine + cat(-x[D / 2 :], x[: D / 2]) * sine; x [1, heads, T, D], the others [1, 1, T,
    D]. With `weight` [D] and `norm` the heads are normalised before."""
    x = _side_by_side(x)
    norms = None if weight is None or norm is None else HeadNorms(weight, weight, *norm)
    return _launch(x, cosine, sine, norms, None)


class WrittenKeys(NamedTuple):
    """Keys and values that a pass writes into a layer of a paged pool, and their slots."""

    key: torch.Tensor  # [1, kv_heads, T, D], not yet rotated
    value: torch.Tensor  # [1, kv_heads, T, value_dim]
    keys: torch.Tensor  # [slots, kv_heads, D]
    values: torch.Tensor  # [slots, kv_heads, value_dim]
    slots: torch.Tensor  # [T] int64


def rotate_and_write(
    query: torch.Tensor,
    written: WrittenKeys,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """`rotate` of the query; keys, rotated likewise, and values go to their slots."""
    key, value = map(_side_by_side, written[:2])
    return _launch(
        _side_by_side(query), cosine, sine, norms, written._replace(key=key, value=value)
    )


def _side_by_side(states: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, dim] whose dimensions of a head lie side by side."""
    return states if states.stride(3) == 1 else states.contiguous()


@on_its_device
def _launch(
    query: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    norms: HeadNorms | None,
    written: WrittenKeys | None,
) -> torch.Tensor:
    _, heads, tokens, dim = query.shape
    turned = query.new_empty((1, tokens, heads, dim))
    # Unused pointers of a variant get any tensor.
    unused = WrittenKeys(query, query, turned, turned, turned)
    key, value, keys, values, slots = written or unused
    kv_heads, value_dim = (0, 1) if written is None else values.shape[1:]
    norm = Norm(0.0) if norms is None else Norm(*norms[2:])
    if tokens == 0:
        return turned.transpose(1, 2)
    _rotate[(tokens, heads + 2 * kv_heads)](
        query,
        key,
        value,
        cosine.contiguous(),
        sine.contiguous(),
        query if norms is None else norms.query_weight,
        query if norms is None else norms.key_weight,
        slots.contiguous(),
        turned,
        keys,
        values,
        *(states.stride(place) for states in (query, key, value) for place in (1, 2)),
        norm.eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=triton.next_power_of_2(dim // 2),
        VALUE_DIM=value_dim,
        VALUE_WIDTH=triton.next_power_of_2(value_dim),
        HAS_NORM=norms is not None,
        **norm_constants(norm),
        num_warps=1,
    )
    return turned.transpose(1, 2)
