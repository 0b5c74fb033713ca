"""Products of many rows in float32 by the kernel of `few_rows`, where torch's own are slower.

torch multiplies float32 by MKL, which on some processors makes no use of their widest registers.
oneDNN does, but keeps code for every shape, and texts have many lengths. Weights are laid out for
every product, a few at a time, which many rows pay for. One choice is made for all shapes: a row's
product does not depend on the number of rows.

Many rows of a narrow type are multiplied by float32 arithmetic where a CPU has no instructions for
that type, and torch takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from draftsmith.kernels.dispatch import reads_freely
from draftsmith.kernels.host_compiler import HEADERS, address_of, function_of
from draftsmith.kernels.measured import CHOICES, Choices, Way
from draftsmith.kernels.products.few_rows import SOURCE

# With fewer rows, laying out costs more than it spares.
LEAST_ROWS = 64
# Each thread lays out 48 outputs of this width: 96 MiB.
MOST_WIDTH = 1 << 19
TORCH, KERNEL = "torch", "few_rows"
# What is timed: a layer's product and the two of its backward pass.
_TIMED_ROWS, _TIMED_WIDTH, _TIMED_OUTPUTS = 256, 512, 768
PLAIN = {torch.Tensor, torch.nn.Parameter}


def _function() -> Any:
    """None where there is no compiler."""
    return function_of(SOURCE, "multiply_plain_float32", "ppppnnnii")


_chosen: dict[int, bool] = {}  # by the number of threads


def choose(choices: Choices = CHOICES) -> bool:
    """True where the kernel is to multiply on as many threads as torch has now, and from now on
    does."""
    shape = (f"{_TIMED_ROWS} x {_TIMED_WIDTH} x {_TIMED_OUTPUTS}",)
    found = (
        _function() is not None
        and choices.fastest(
            "float32 products", shape, (TORCH, KERNEL), _ways, sources=[SOURCE, *HEADERS]
        )
        == KERNEL
    )
    _chosen[torch.get_num_threads()] = found
    return found


def _ways() -> Mapping[str, Way]:
    rows, grad, weight = (
        torch.ones(shape)
        for shape in (
            (_TIMED_ROWS, _TIMED_WIDTH),
            (_TIMED_ROWS, _TIMED_OUTPUTS),
            (_TIMED_OUTPUTS, _TIMED_WIDTH),
        )
    )
    products = ((rows, weight.T), (grad, weight), (grad.T, rows))
    return {
        TORCH: lambda: [a @ b for a, b in products],
        KERNEL: lambda: [_product(a, b, None) for a, b in products],
    }


def _has_kernel() -> bool:
    found = _chosen.get(torch.get_num_threads())
    return choose() if found is None else found


def is_faster(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True for matrices that `multiply` leaves to the kernel."""
    return (
        a.ndim == b.ndim == 2
        and len(a) >= LEAST_ROWS
        and a.shape[1] == b.shape[0]
        and 0 < a.shape[1] <= MOST_WIDTH
        and _is_float32(a, b)
        and _has_kernel()
    )


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [m, k] @ b [k, n], of any layout and type, without gradients."""
    return _product(a, b, None) if is_faster(a, b) else a @ b


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    by_columns = not b.T.is_contiguous()
    a, b = a.contiguous(), b.contiguous() if by_columns else b
    bias = None if bias is None else bias.contiguous()
    width, count = b.shape
    out = a.new_empty(len(a), count)
    _function()(
        a.data_ptr(),
        b.data_ptr(),
        address_of(bias),
        out.data_ptr(),
        len(a),
        width,
        count,
        int(by_columns),
        torch.get_num_threads(),
    )
    return out


def faster_linears(
    device: torch.device, dtype: torch.dtype = torch.float32
) -> AbstractContextManager[Any]:
    """Context in which linear layers in float32 on a CPU, and their backward passes, are the
    kernel's where it is faster, and those in a narrower `dtype` are `widened` where that is faster.
    Other types, autocast and few rows stay torch's; on another device than a CPU, and where it
    begins under autocast, all do, and the context is empty: its mode costs a microsecond per call
    of torch."""
    is_plain = reads_freely(device) and not torch.is_autocast_enabled("cpu")
    if not is_plain or not (_has_kernel() or widens(dtype)):
        return nullcontext()
    return _Linears()


class _Linears(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is linear and not kwargs:
            if _takes(*args):
                return _linear(*args)
            if _is_widened(*args):
                return widened(*args)
        return func(*args, **(kwargs or {}))


def _takes(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    # torch says what is wrong with sizes that do not fit.
    return (
        _is_float32(rows, weight)
        and not torch.is_autocast_enabled("cpu")
        and weight.ndim == 2
        and rows.ndim > 0
        and rows.shape[-1] == weight.shape[1]
        and 0 < weight.shape[1] <= MOST_WIDTH
        and rows.numel() >= LEAST_ROWS * weight.shape[1]
        and (bias is None or (_is_float32(bias, weight) and bias.shape == weight.shape[:1]))
    )


def _is_widened(rows: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor | None) -> bool:
    return (
        rows.dtype == weight.dtype
        and rows.numel() >= LEAST_ROWS * rows.shape[-1]
        and {type(rows), type(weight)} <= PLAIN
        and not torch.is_autocast_enabled("cpu")
        and widens(rows.dtype)
    )


def _is_float32(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Subclasses, as those of spread tensors, may hold no memory.
    return (
        a.dtype == b.dtype == torch.float32
        and reads_freely(a.device)
        and reads_freely(b.device)
        and {type(a), type(b)} <= PLAIN
    )


def _linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    trained = (rows, weight) if bias is None else (rows, weight, bias)
    if torch.is_grad_enabled() and any(one.requires_grad for one in trained):
        return _Linear.apply(rows, weight, bias)
    return _applied(rows, weight, bias)


def _applied(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., k] by [n, k] -> [..., n]."""
    out = _product(rows.reshape(-1, rows.shape[-1]), weight.T, bias)
    return out.view(*rows.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, bias):
        wants_rows, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if wants_weight else None, weight if wants_rows else None)
        return _applied(rows, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        of_rows = of_weight = of_bias = None
        if wants_rows:
            of_rows = multiply(flat, weight).view(*grad.shape[:-1], -1)
        if wants_weight:
            of_weight = multiply(flat.T, rows.reshape(-1, rows.shape[-1]))
        if wants_bias:
            of_bias = flat.sum(dim=0)
        return of_rows, of_weight, of_bias


NARROW = (torch.bfloat16, torch.float16)
LEAST_WIDENED = 17  # with fewer, widening the weights costs more than it spares
_WIDE_ROWS, _WIDE_WIDTH = 128, 1024  # of the product that is timed


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
