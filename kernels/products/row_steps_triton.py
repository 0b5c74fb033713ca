"""Steps between the products of a layer in Triton, each one launch that rounds to the dtype where
the several operations do: RMS norms, alone or with the residual sum that they read; rotary
embeddings, for attention over a paged pool with all that comes before it (norms of queries and keys
where a model has them, the write of keys and values into the pool); gates, an activation times what
it lets through.

`_normalise`, program r: row r, held in registers whole. `_rotate`, program (token, head): heads of
the query first, then those of the key, then those of the value. `_gate`, program (token, block):
`_BLOCK` numbers of a token. Legend: H width of a row, T tokens, D width of a head of query and key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device, side_by_side


class Norm(NamedTuple):
    """Numbers of an RMS norm beside its weight. `wide`: the weight, with `offset` added, multiplies
    in float32, before the result is rounded; else after that."""

    eps: float
    offset: float = 0.0
    wide: bool = False


@triton.jit
def weighted(
    normed, weight, at, inside, dtype: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr
):
    """float32 `normed` times the numbers `at` of `weight`, rounded to `dtype`, as float32."""
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if WIDE:
        return (normed * (factor + OFFSET)).to(dtype).to(tl.float32)
    return (normed.to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32)


@triton.jit
def _normalise(
    x,
    residual,  # [rows, H], or None
    weight,  # [H], or None
    total,  # [rows, H], written with a residual: x + residual
    out,  # [rows, H], written
    token_stride,  # of x
    head_stride,
    eps,
    HEADS: tl.constexpr,  # rows of a token
    WIDTH: tl.constexpr,  # H
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype = out.dtype.element_ty
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    begin = row // HEADS * token_stride + row % HEADS * head_stride
    numbers = tl.load(x + begin + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        added = tl.load(residual + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        rounded = (numbers + added).to(dtype)
        tl.store(total + row * WIDTH + at, rounded, mask=inside)
        numbers = rounded.to(tl.float32)
    normed = numbers * tl.rsqrt(tl.sum(numbers * numbers, axis=0) / WIDTH + eps)
    if weight is not None:
        normed = weighted(normed, weight, at, inside, dtype, OFFSET, WIDE)
    tl.store(out + row * WIDTH + at, normed.to(dtype), mask=inside)


def normalise(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
) -> torch.Tensor:
    """x / sqrt(mean(x ** 2, -1) + eps), in float32, times `weight` [H]; x [..., H] of any strides.
    See `Norm`."""
    if not _in_rows(x):
        x = x.contiguous()
    return _launch_norm(x, None, weight, Norm(eps, offset, wide))[1]


def add_normalise(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + residual, and `normalise` of it; both [..., H]."""
    return _launch_norm(x.contiguous(), residual.contiguous(), weight, Norm(eps, offset, wide))


def _in_rows(x: torch.Tensor) -> bool:
    """True where the kernel reaches the rows of `x` by two strides."""
    return x.is_contiguous() or (x.ndim in (3, 4) and len(x) == 1 and x.stride(-1) == 1)


@on_its_device
def _launch_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    num_rows = x.numel() // width
    heads, strides = 1, (width, 0)
    if not x.is_contiguous():
        heads = 1 if x.ndim == 3 else x.shape[2]
        strides = (x.stride(1), x.stride(2) if x.ndim == 4 else 0)
    out = x.new_empty(x.shape)
    total = out if residual is None else x.new_empty(x.shape)
    if num_rows == 0:
        return total, out
    _normalise[(num_rows,)](
        x,
        residual,
        weight,
        total,
        out,
        *strides,
        norm.eps,
        HEADS=heads,
        **norm_constants(norm),
        **sizes(width),
    )
    return total, out


def norm_constants(norm: Norm) -> dict[str, Any]:
    return {"OFFSET": norm.offset, "WIDE": norm.wide}


def sizes(width: int) -> dict[str, Any]:
    """Constants of rows of `width` numbers. A thread has eight of them, 16 bytes in half precision,
    as long as a program can have so many threads."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(32, max(1, block // 256))}


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
    weight,  # [D], or None for no norm
    out,  # [D], written
    eps,
    DIM: tl.constexpr,  # D
    HALF: tl.constexpr,  # D / 2 or the next power of two
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
    if weight is not None:
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
    query_weight,  # [D], or None for no norm
    key_weight,  # [D], or None
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
            eps, DIM, HALF, OFFSET, WIDE,
        )  # fmt: skip
    elif head < HEADS + KV_HEADS:
        head -= HEADS
        _turn(
            key + token * key_token_stride + head * key_head_stride,
            cosines, sines, key_weight,
            keys + (tl.load(slots + token) * KV_HEADS + head) * DIM,
            eps, DIM, HALF, OFFSET, WIDE,
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
    *norm: Any,
) -> torch.Tensor:
    """x * cosine + cat(-x[D / 2 :], x[: D / 2]) * sine; x [1, heads, T, D], the others [1, 1, T,
    D]. With `weight` [D] and the numbers of a `Norm` the heads are normalised before."""
    x = side_by_side(x)
    norms = None if weight is None else HeadNorms(weight, weight, *norm)
    return _launch_rotation(x, cosine, sine, norms, None)


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
    key, value = map(side_by_side, written[:2])
    return _launch_rotation(
        side_by_side(query), cosine, sine, norms, written._replace(key=key, value=value)
    )


@on_its_device
def _launch_rotation(
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
        None if norms is None else norms.query_weight,
        None if norms is None else norms.key_weight,
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
        **norm_constants(norm),
        num_warps=1,
    )
    return turned.transpose(1, 2)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_BLOCK = 1024
_HALF_ROOT = tl.constexpr(0.7071067811865476)  # 1 / sqrt(2)
_SLOPE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
_CUBE = tl.constexpr(0.044715)


@triton.jit
def _gate(
    x,
    factor,
    out,  # [T, WIDTH], written
    x_stride,  # of a token
    factor_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dtype = out.dtype.element_ty
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    numbers = tl.load(x + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(factor + token * factor_stride + at, mask=inside, other=0.0)
    if ACTIVATION == "silu":
        opened = numbers * tl.sigmoid(numbers)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 u), which loses no digits where tanh(u) is near -1.
        inner = numbers + numbers * numbers * numbers * _CUBE
        opened = numbers * tl.sigmoid(inner * _SLOPE)
    else:
        opened = numbers * 0.5 * (1.0 + tl.erf(numbers * _HALF_ROOT))
    opened = opened.to(dtype).to(tl.float32)
    tl.store(out + token * WIDTH + at, (opened * factors.to(tl.float32)).to(dtype), mask=inside)


@on_its_device
def gate(x: torch.Tensor, factor: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(x) * factor, both [1, T, H]; one of `ACTIVATIONS`."""
    x, factor = side_by_side(x), side_by_side(factor)
    _, tokens, width = x.shape
    out = x.new_empty((1, tokens, width))
    if out.numel() == 0:
        return out
    _gate[(tokens, triton.cdiv(width, _BLOCK))](
        x,
        factor,
        out,
        x.stride(1),
        factor.stride(1),
        WIDTH=width,
        BLOCK=_BLOCK,
        ACTIVATION=activation,
    )
    return out
