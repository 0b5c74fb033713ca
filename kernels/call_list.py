"""Lists of kernel calls that are made by one call, for a CPU with a C++ compiler. Of a few rows, a
kernel's call from Python costs about as much as a small model's step, and each call gives Python's
lock away, which another thread may keep for long.

Legend: T tokens of the pass.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.kernels.host_compiler import function_of

SOURCE = Path(__file__).with_name("call_list_cpu.cpp")
_MOST_PLACES, _MOST_NUMBERS, _MOST_REALS = 4, 12, 2
# What `run` returns: 0, or why it has stopped.
NO_BLOCK, NO_ROW = 1, 2
BEHIND_BLOCKS = "a token of the pass lies behind the blocks of its row"
_number = ctypes.c_int64


class CallKind(enum.IntEnum):
    """Kernel of a call; its places in brackets, then its numbers. Strides and widths count numbers,
    a token's own."""

    MULTIPLY = 0  # (rows, weights, bias, out) width, outputs, readings: `few_rows`
    # (x, weight, out) rows of a token, width, stride, bytes of a number, wide; eps, offset
    NORMALISE = 1
    ROTATE = 2  # (x, cosine, sine, out) heads, dim, stride of a token, stride of a head
    GATE = 3  # (x, factor, out) width, stride of x, stride of the factor
    ADD = 4  # the same
    COPY = 5  # (x, out) width, stride of x, stride of out, all in bytes
    # (query, key, value, out) layer, heads, key heads, key dim, value dim, strides of a head and of
    # a token of each, 2 * window + 1 where it is the size of chunks; scaling
    ATTEND = 6
    ROWS = 7  # (table, a number for each token, out) bytes of a row, rows of the table
    # (x, a number for each token, out) width and stride of x, in bytes; zeros where the number is 0
    CLEAR = 8


class ArgumentPlace(ctypes.Structure):
    """The address `bases[base] + per_token * T + fixed`, in bytes; `bases[0]` is 0."""

    _fields_ = [("base", _number), ("per_token", _number), ("fixed", _number)]


class KernelCall(ctypes.Structure):
    """`function` is a compiled kernel; None for `COPY`, `ROWS` and `CLEAR`."""

    _fields_ = [
        ("kind", _number),
        ("function", ctypes.c_void_p),
        ("places", ArgumentPlace * _MOST_PLACES),
        ("numbers", _number * _MOST_NUMBERS),
        ("reals", ctypes.c_float * _MOST_REALS),
    ]

    @classmethod
    def of(
        cls,
        kind: CallKind,
        function: Any,
        places: Sequence[ArgumentPlace],
        numbers: Sequence[int],
        reals: Sequence[float],
    ) -> KernelCall:
        address = ctypes.cast(function, ctypes.c_void_p) if function is not None else None
        call = cls(kind, address)
        for field, values in ((call.places, places), (call.numbers, numbers), (call.reals, reals)):
            field[: len(values)] = list(values)
        return call


class RowAddresses(ctypes.Structure):
    """Rows of a pass, for `CallKind.ATTEND`: addresses of int64 numbers as `paged.py` has them, of
    each row's first token, and of a `TreeLayout`, 0 without trees; then counts."""

    _fields_ = [
        *((name, _number) for name in ("tables", "kv_indices", "lengths", "begins")),
        *((name, _number) for name in ("ancestors", "first")),
        *((name, _number) for name in ("num_rows", "longest_row", "table_width", "block_size")),
    ]


class CallList:
    """Made by `call_list`. The list, alive, keeps `held`; what else its places name is the
    caller's to keep."""

    def __init__(self, function: Any, calls: Sequence[KernelCall], held: Sequence[Any]):
        self._function, self.held = function, held
        self.calls = (KernelCall * len(calls))(*calls)

    def __call__(
        self, bases: Sequence[int], tokens: int, rows: RowAddresses, layers: torch.Tensor
    ) -> bool:
        """`layers` [L, 2] int64: addresses of each layer's keys and values. False where a table has
        no row of some number; raises `IndexError` where a token lies behind the blocks of its
        row."""
        outcome = self._function(
            self.calls,
            len(self.calls),
            (_number * len(bases))(*bases),
            tokens,
            ctypes.byref(rows),
            layers.data_ptr(),
            torch.get_num_threads(),
        )
        if outcome == NO_BLOCK:
            raise IndexError(BEHIND_BLOCKS)
        return outcome != NO_ROW


def call_list(calls: Sequence[KernelCall], held: Sequence[Any] = ()) -> CallList | None:
    """`held`: objects whose memory the fixed addresses lie in. None where there is no C++
    compiler."""
    function = function_of(SOURCE, "run", "pnpnppi", result="i")
    return None if function is None else CallList(function, calls, held)
