"""Arrays of records by a compiled kernel, for a CPU with a C++ compiler: a row of logits is read
three times, from a cache, and nothing of its size is written. A row's result does not depend on
the other rows. n positions, V vocabulary."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.config import TOP
from draftsmith.kernels.host_compiler import compiled
from draftsmith.record import ProbArrays

SOURCE = Path(__file__).with_name("logged_cpu.cpp")
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MOST_KEPT = 128  # `kGroups` of the source

_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = [_pointer, _number, *[_pointer] * 2, *[_number] * 3, *[_pointer] * 3, ctypes.c_int]


@cache
def _kernel(dtype: torch.dtype) -> Any:
    library = compiled(SOURCE) if dtype in NAMES else None
    if library is None:
        return None
    function = getattr(library, f"reduce_{NAMES[dtype]}")
    function.argtypes, function.restype = _ARGUMENTS, None
    return function


def prepare() -> None:
    """Compiles now, so that no round waits for it."""
    compiled(SOURCE)


def prob_arrays(
    logits: torch.Tensor,
    tokens: Sequence[int],
    temperatures: Sequence[float] | None,
    most: int = TOP,
) -> ProbArrays | None:
    """Arrays of the `most` likeliest tokens of logits [n, V], with the logprobs of the drafted
    `tokens` (one that is not known counts as token 0) and, where a temperature is neither 0 nor 1,
    the norm under it; None where no kernel can read them or keep that many. Raises `IndexError` for
    a token beyond the vocabulary."""
    is_readable = logits.device.type == "cpu" and logits.stride(-1) == 1
    kernel = _kernel(logits.dtype) if is_readable else None
    if kernel is None:
        return None
    count, vocab_size = logits.shape
    kept = min(most, vocab_size)
    if kept > MOST_KEPT:
        return None
    drafted = np.maximum(np.asarray(tokens, dtype=np.int64), 0)
    if drafted.max(initial=0) >= vocab_size:
        raise IndexError(f"token {drafted.max()} is beyond a vocabulary of {vocab_size}")
    scales = None if temperatures is None else np.asarray(temperatures, dtype=np.float32)
    ids = np.empty((count, kept), dtype=np.int32)
    logprobs, rest = np.empty((count, kept), np.float32), np.empty((3, count), np.float32)
    kernel(
        logits.data_ptr(),
        logits.stride(0),
        drafted.ctypes.data,
        None if scales is None else scales.ctypes.data,
        count,
        vocab_size,
        kept,
        ids.ctypes.data,
        logprobs.ctypes.data,
        rest.ctypes.data,
        torch.get_num_threads(),
    )
    return ProbArrays(ids, logprobs, *rest)
