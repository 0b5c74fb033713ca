"""Uniform numbers of a race by a compiled kernel, for a CPU with a C++ compiler: the bits of
`random_streams`, in one operation in place of seventeen."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from draftsmith.kernels.host_compiler import compiled

SOURCE = Path(__file__).with_name("noise_cpu.cpp")


@cache
def _kernel() -> Any:
    library = compiled(SOURCE)
    if library is None:
        return None
    function = library.uniforms_float32
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2
    function.restype = None
    return function


def uniforms(keys: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | None:
    """Draws of each key [N] and token [V], int64, in (0, 1) -> [N, V] float32; None where there is
    no compiler."""
    kernel = _kernel()
    if kernel is None:
        return None
    keys, offsets = keys.contiguous(), offsets.contiguous()
    out = torch.empty((len(keys), len(offsets)), dtype=torch.float32)
    kernel(keys.data_ptr(), offsets.data_ptr(), out.data_ptr(), len(keys), len(offsets))
    return out
