"""The divergences of rows by a compiled kernel, for a CPU with a C++ compiler: a row of logits is
read from a cache, and of its size nothing but the gradient is written, over it. Rows that share
their target logits share the target's distribution."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from draftsmith.kernels.divergence.kind import Kind
from draftsmith.kernels.divergence.rows import RowInputs, RowTerms
from draftsmith.kernels.host_compiler import compiled

SOURCE = Path(__file__).with_name("rows_cpu.cpp")
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# jsd, whose mixture needs a logarithm of every token, is torch's.
CODES = {
    "forward-kl": 0, "reverse-kl": 1, "tv": 2, "tvd++": 3, "lk-alpha": 4, "lk-hybrid": 5, "ce": 6,
}  # fmt: skip

_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = [ctypes.c_int, _pointer, _number, _pointer, _number, *[_pointer] * 4]
_ARGUMENTS += [ctypes.c_double, *[_number] * 4, *[_pointer] * 4, ctypes.c_int]


@cache
def _kernel(draft: torch.dtype, target: torch.dtype) -> Any:
    library = compiled(SOURCE) if draft in NAMES and target in NAMES else None
    if library is None:
        return None
    function = getattr(library, f"diverge_{NAMES[draft]}_{NAMES[target]}")
    function.argtypes, function.restype = _ARGUMENTS, None
    return function


def divergence_rows_compiled(kind: Kind, rows: RowInputs) -> RowTerms | None:
    """`divergence_rows` in float32, the gradient over the draft logits; None where no kernel
    computes it: another type or layout of logits, jsd, no compiler."""
    draft, target = rows.draft_logits, rows.target_logits
    is_readable = draft.stride(-1) == target.stride(-1) == 1 and rows.weights.dtype == torch.float32
    if kind.name not in CODES or not is_readable or draft.device.type != "cpu":
        return None
    kernel = _kernel(draft.dtype, target.dtype)
    if kernel is None or (kind.name == "ce" and rows.columns is None):
        return None
    loss, alpha, keep, outside = torch.empty(4, len(draft), dtype=torch.float32)
    # Held until the kernel has read them.
    weights = rows.weights.contiguous()
    which, vocab_map, columns = (
        None if one is None else one.contiguous()
        for one in (rows.which, rows.vocab_map, rows.columns)
    )
    kernel(
        CODES[kind.name],
        draft.data_ptr(),
        draft.stride(0),
        target.data_ptr(),
        target.stride(0),
        _address(which),
        weights.data_ptr(),
        _address(vocab_map),
        _address(columns),
        kind.parameter,
        len(draft),
        draft.shape[-1],
        len(target),
        target.shape[-1],
        loss.data_ptr(),
        alpha.data_ptr(),
        None if columns is None else keep.data_ptr(),
        outside.data_ptr(),
        torch.get_num_threads(),
    )
    return RowTerms(loss, alpha, None if columns is None else keep, outside, draft)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
