"""Time of a captured pass by its kernels: `scripts/bench_step --kernels`. Each is called alone, in
the order of the pass, so that it finds in the caches what it finds there in a pass."""

from __future__ import annotations

import copy
import ctypes
import math
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from draftsmith.drafters.target.target import Target
from draftsmith.kernels.call_list import CallList, Kind
from draftsmith.kernels.products.few_rows import gated_rows


class _EachAlone:
    """Stands in place of a list of calls."""

    def __init__(self, whole: CallList, gated: int | None):
        self.labels = [label_of(call, gated) for call in whole.calls]
        self._parts = [_alone(whole, call) for call in whole.calls]
        self.least_s = [math.inf] * len(self._parts)

    def __call__(self, *arguments: Any) -> bool:
        done = True
        for index, part in enumerate(self._parts):
            begun_s = perf_counter()
            done &= part(*arguments)
            self.least_s[index] = min(self.least_s[index], perf_counter() - begun_s)
        return done


def label_of(call: Any, gated: int | None) -> str:
    """`gated` is the address of the kernel whose products are gated, of twice the outputs."""
    kind = Kind(call.kind)
    if kind is not Kind.MULTIPLY:
        return kind.name.lower()
    halves = "2*" if call.function == gated else ""
    return f"{'gated' if halves else 'multiply'} {call.numbers[0]} x {halves}{call.numbers[1]}"


def gated_kernel(dtype: torch.dtype) -> int | None:
    made = gated_rows(torch.zeros(2, 64, dtype=dtype), None)
    return None if made is None else ctypes.cast(made.function, ctypes.c_void_p).value


def _alone(whole: CallList, call: Any) -> CallList:
    part = copy.copy(whole)
    part.calls = (type(call) * 1)(call)
    return part


def kernel_times(target: Target, run: Callable[[], Any], steps: int) -> dict[str, float]:
    """Sums of the lowest ms of all kernels of a kind in `run`, a pass of the captured `target`;
    products by width and outputs, those with a gate of their own. Empty where the pass is not one call."""
    forwards: Any = target.forwards
    one_call = None if forwards is None else forwards.body.calls
    if one_call is None:
        return {}
    alone = _EachAlone(one_call.calls, gated_kernel(target.dtype))
    with patch.object(one_call, "calls", alone):
        for _ in range(steps):
            run()
    sums: dict[str, float] = defaultdict(float)
    for label, least_s in zip(alone.labels, alone.least_s, strict=True):
        sums[label] += 1e3 * least_s
    return {label: round(ms, 3) for label, ms in sums.items()}
