"""Times of a model's products beside torch's, by shape: `scripts/bench_step --products`. All products of
a pass are multiplied in its order, so that each finds in the caches what it finds there in a pass."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear, silu

from draftsmith.drafters.compiled.packed_linear import GatedLinear, PackedLinear
from draftsmith.kernels.measured import CHOICES

ROWS = (1, 4, 8, 64, 256)
OURS, TORCH, ONEDNN = "ours", "torch", "oneDNN"
Multiply = Callable[[torch.Tensor], Any]


class Row(NamedTuple):
    """Least ms of all products of a shape in a pass."""

    shape: str
    rows: int
    ms: dict[str, float]

    @property
    def over_torch(self) -> float:
        """Time of the better of torch's two by ours."""
        return min(ms for way, ms in self.ms.items() if way != OURS) / self.ms[OURS]


def ways_of(product: PackedLinear) -> dict[str, Multiply]:
    """The gate is within all of them, or within none."""
    joined = torch.cat(list(product.weights))
    finish = _gated if isinstance(product, GatedLinear) else _as_it_is
    found: dict[str, Multiply] = {
        OURS: product,
        TORCH: lambda rows: finish(linear(rows, joined)),
    }
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(joined, 8)
    except RuntimeError:  # a type that oneDNN does not take on this processor
        return found
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return found | {ONEDNN: lambda rows: finish(multiply(rows, packed, None, "none", [], ""))}


def _as_it_is(outputs: torch.Tensor) -> torch.Tensor:
    return outputs


def _gated(outputs: torch.Tensor) -> torch.Tensor:
    opened, factor = outputs.chunk(2, -1)
    return silu(opened) * factor


def shape_of(product: PackedLinear) -> str:
    gate = "2 * " if isinstance(product, GatedLinear) else ""
    outputs = product.sizes[0] if gate else sum(product.sizes)
    return f"{product.weights[0].shape[1]} x {gate}{outputs}"


@torch.inference_mode()
def product_times(products: Sequence[PackedLinear], turns: int) -> list[Row]:
    ways = [ways_of(product) for product in products]
    shapes = [shape_of(product) for product in products]
    found = []
    for count in ROWS:
        rows = {
            width: torch.randn(1, count, width, dtype=products[0].dtype)
            for width in {product.weights[0].shape[1] for product in products}
        }
        least_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(lambda: math.inf))
        for _ in range(turns):
            for way in ways[0]:
                taken_s: dict[str, float] = defaultdict(float)
                for product, shape, each in zip(products, shapes, ways, strict=True):
                    multiply = partial(each[way], rows[product.weights[0].shape[1]])
                    begun_s = perf_counter()
                    multiply()
                    taken_s[shape] += perf_counter() - begun_s
                for shape, one_s in taken_s.items():
                    least_s[shape][way] = min(least_s[shape][way], one_s)
        for shape, by_way in least_s.items():
            found.append(Row(shape, count, {way: 1e3 * s for way, s in by_way.items()}))
    return found


def show_products(products: Sequence[PackedLinear], turns: int) -> dict[str, Any]:
    """Prints the table, and what was chosen; returns the times."""
    times = sorted(product_times(products, turns), key=lambda row: row.shape)
    kinds = list(times[0].ms)
    print(
        f"{'width x outputs, rows':32}" + "".join(f"{kind:>10}" for kind in kinds) + "  torch/ours"
    )
    for row in times:
        cells = "".join(f"{row.ms[kind]:10.3f}" for kind in kinds)
        print(f"{f'{row.shape}, {row.rows}':32}{cells}{row.over_torch:12.2f}")
    ways = {f"{shape_of(one)}, more than 64 rows": one.way for one in products}
    for shape, way in ways.items():
        print(f"{shape}: {way}")
    print(*CHOICES.lines(), sep="\n")
    return {f"{row.shape}, {row.rows}": {**row.ms, "ratio": row.over_torch} for row in times}
