"""The cases of what lies between the products of a layer, at the sizes of a verification pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import rms_norm, silu

from draftsmith.kernels.dispatch import interpreted
from scripts.bench.kernels.case import Call, Case, Sizes

if TYPE_CHECKING:
    from draftsmith.kernels.forward.rotation_triton import Written

EPS = 1e-6


def forward_cases(sizes: Sizes, device: torch.device) -> Iterator[Callable[[], Case]]:
    for make in (norm_step, gate_step, rotation_step):
        yield partial(make, sizes, device)


def _ways(device: torch.device, ours: Call, reference: Call) -> dict[str, Call]:
    """Triton runs on CUDA, and in its interpreter."""
    triton = device.type == "cuda" or interpreted()
    return {"ours": ours, "reference": reference} if triton else {"reference": reference}


def _states(device: torch.device, *shape: int) -> torch.Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(shape, device=device, dtype=dtype)


def _num_tokens(sizes: Sizes) -> int:
    return sizes.requests * (sizes.depth + 1)


def norm_step(sizes: Sizes, device: torch.device) -> Case:
    count = _num_tokens(sizes)
    x, residual = _states(device, 1, count, sizes.width), _states(device, 1, count, sizes.width)
    weight = _states(device, sizes.width)

    def ours() -> Any:
        from draftsmith.kernels.forward.norm_triton import add_normalise

        return add_normalise(x, residual, weight, EPS)

    def reference() -> Any:
        total = x + residual
        return total, rms_norm(total, (sizes.width,), weight, EPS)

    shape, floor = f"{count} rows of {sizes.width}", 4 * x.numel() * x.dtype.itemsize
    return Case("sum and norm step", shape, floor, _ways(device, ours, reference), ["reference"])


def gate_step(sizes: Sizes, device: torch.device) -> Case:
    count, width = _num_tokens(sizes), 4 * sizes.width
    both = _states(device, 1, count, 2 * width)
    opened, factor = both.split(width, dim=-1)

    def ours() -> Any:
        from draftsmith.kernels.forward.gate_triton import gate

        return gate(opened, factor, "silu")

    ways = _ways(device, ours, lambda: silu(opened) * factor)
    floor = 3 * opened.numel() * opened.dtype.itemsize
    return Case("gate step", f"{count} rows of {width}", floor, ways, ["reference"])


def rotation_step(sizes: Sizes, device: torch.device) -> Case:
    """Rotation of query and key, and the write of keys and values into a paged pool."""
    count, (heads, kv_heads, dim) = _num_tokens(sizes), sizes.layers_kv
    query = _states(device, 1, count, heads, dim).transpose(1, 2)
    key, value = (_states(device, 1, count, kv_heads, dim).transpose(1, 2) for _ in range(2))
    cosine, sine = (_states(device, 1, 1, count, dim) for _ in range(2))
    pool = [_states(device, 2 * count, kv_heads, dim) for _ in range(2)]
    slots = torch.randperm(2 * count, device=device)[:count]

    def written() -> Written:
        from draftsmith.kernels.forward.rotation_triton import Written

        return Written(key, value, pool[0], pool[1], slots)

    def ours() -> Any:
        from draftsmith.kernels.forward.rotation_triton import rotate_and_write

        return rotate_and_write(query, written(), cosine, sine, None)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat([-second, first], dim=-1) * sine

    def reference() -> Any:
        pool[0].index_copy_(0, slots, turned(key)[0].transpose(0, 1))
        pool[1].index_copy_(0, slots, value[0].transpose(0, 1))
        return turned(query)

    floor = 2 * (query.numel() + key.numel() + value.numel()) * query.dtype.itemsize
    shape = f"{count} tokens, {heads} heads on {kv_heads} of {dim}"
    return Case(
        "rotation and write step", shape, floor, _ways(device, ours, reference), ["reference"]
    )
