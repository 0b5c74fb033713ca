"""Products of many rows of a narrow type by float32 arithmetic, where a CPU has no instructions for
that type and torch takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from draftsmith.kernels.dispatch import reads_freely
from draftsmith.kernels.measured import CHOICES, Choices, Way

NARROW = (torch.bfloat16, torch.float16)
LEAST_ROWS = 64  # of a layer of a whole text
LEAST_WIDENED = 17  # with fewer, widening the weights costs more than it spares
_WIDE_ROWS, _WIDE_WIDTH = 128, 1024  # of the product that is timed
# Subclasses, as those of spread tensors, may hold no memory.
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def widened(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., in] by [out, in] -> [..., out]: sums in float32, rounded once."""
    wide = linear(rows.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(rows.dtype)


def widens(dtype: torch.dtype, choices: Choices = CHOICES) -> bool:
    """True where many rows of `dtype` are multiplied faster by `widened` than by torch, on a
    CPU."""
    if dtype not in NARROW:
        return False

    def ways() -> dict[str, Way]:
        rows, weight = (
            torch.full((count, _WIDE_WIDTH), 0.5, dtype=dtype)
            for count in (_WIDE_ROWS, _WIDE_WIDTH)
        )
        return {"torch": lambda: linear(rows, weight), "float32": lambda: widened(rows, weight)}

    return choices.fastest("narrow products", (dtype,), ("torch", "float32"), ways) == "float32"


def faster_linears(
    device: torch.device, dtype: torch.dtype, choices: Choices = CHOICES
) -> AbstractContextManager[Any]:
    """Context in which linear layers of many rows in `dtype` on a CPU are `widened` where that is
    faster. Other types, autocast and few rows stay torch's; on another device than a CPU, and where
    it begins under autocast, all do, and the context is empty: its mode costs a microsecond per
    call of torch."""
    is_plain = reads_freely(device) and not torch.is_autocast_enabled("cpu")
    return _Linears(dtype) if is_plain and widens(dtype, choices) else nullcontext()


class _Linears(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is linear and not kwargs and self._widens(*args):
            return widened(*args)
        return func(*args, **(kwargs or {}))

    def _widens(self, rows: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor | None) -> bool:
        return (
            rows.dtype == weight.dtype == self._dtype
            and rows.numel() >= LEAST_ROWS * rows.shape[-1]
            and {type(rows), type(weight)} <= _PLAIN
            and not torch.is_autocast_enabled("cpu")
        )
