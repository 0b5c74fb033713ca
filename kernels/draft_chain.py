"""Drafting of chains by lists of kernel calls, for a CPU with a C++ compiler: what a draft has not
read, and then token by token its states, its logits and its draws, in one call.

Legend: B rows, K drafts of a row, V vocabulary, M most tokens of a pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from draftsmith.kernels.call_list import BEHIND_BLOCKS, NO_BLOCK, NO_ROW, SOURCE, CallList
from draftsmith.kernels.host_compiler import compiled
from draftsmith.kernels.sampling.draw_compiled import draw_kernel

_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_NOT_TAKEN = -3  # `kNotTaken` of the source


class NoRow(LookupError):
    """A table ends before a token's number."""


class ChainPart(ctypes.Structure):
    """A list of calls and the bases of its places."""

    _fields_ = [("calls", _pointer), ("num_calls", _number), ("bases", _pointer)]

    @classmethod
    def of(cls, calls: CallList, bases: Sequence[int]) -> ChainPart:
        held = (_number * len(bases))(*bases)
        part = cls(ctypes.addressof(calls.calls), len(calls.calls), ctypes.addressof(held))
        part.held = calls, held  # alive as long as the part
        return part


class Chain(ctypes.Structure):
    """A draft and the memory of its parts; `Chain` of the source says which."""

    _fields_ = [
        *((name, ChainPart) for name in ("embed", "fuse", "step", "head")),
        *((name, _pointer) for name in ("draw", "ids", "positions", "hidden", "stepped", "heads")),
        *((name, _pointer) for name in ("logits", "wide", "processed")),
        *((name, _number) for name in ("next", "head_input", "width", "taps_base", "draft_vocab")),
        *((name, _number) for name in ("logits_width", "ahead", "most_tokens", "most_in_row")),
    ]


class DraftRound(ctypes.Structure):
    """Rows to draft: addresses of what `DraftInputs` and `DraftSampler` hold, then counts."""

    _fields_ = [
        *((name, _pointer) for name in ("tokens", "starts", "lengths", "budgets", "tables")),
        *((name, _pointer) for name in ("seeds", "taps", "temperature", "top_k", "top_p", "min_p")),
        *((name, _pointer) for name in ("vocab_map", "layers", "drafted", "drafted_lengths")),
        *((name, _pointer) for name in ("best", "q")),
        *((name, _number) for name in ("taps_width", "num_rows", "depth", "vocab")),
        *((name, _number) for name in ("table_width", "block_size")),
    ]


@cache
def _draft() -> Any:
    library = compiled(SOURCE)
    if library is None:
        return None
    library.draft.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    library.draft.restype = _number
    return library.draft


def draw_address() -> int | None:
    """Address of the compiled draw; None without a compiler."""
    kernel = draw_kernel()
    return None if kernel is None else ctypes.cast(kernel, ctypes.c_void_p).value


def draft(chain: Chain, round: DraftRound) -> int | None:
    """Depths that were drawn, `round.depth` where all were; of the next one torch has to draw, from
    the chain's memory. None where nothing was done: a row has too many tokens to read, or there
    are too many rows. Raises `IndexError` where a token lies behind the blocks of its row, and
    `NoRow` where a table has no row of some number."""
    drawn = _draft()(ctypes.byref(chain), ctypes.byref(round), torch.get_num_threads())
    if drawn == -NO_BLOCK:
        raise IndexError(BEHIND_BLOCKS)
    if drawn == -NO_ROW:
        raise NoRow("a table has no row of a token's number")
    return None if drawn == _NOT_TAKEN else drawn
