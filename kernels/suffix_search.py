"""Searches of suffix decoding in compiled code, for a machine with a C++ compiler. Every drafted
token takes one, which takes Python several times as long."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.kernels.host_compiler import function_of

SOURCE = Path(__file__).with_name("suffix_search_cpu.cpp")
_number, _address = ctypes.c_int64, ctypes.c_void_p
_EACH = _address * 4  # order


class IndexFields(ctypes.Structure):
    """An index of texts, and its arrays. The caller sets `oldest`, `end`, and `begin` of the newest
    text."""

    _fields_ = [
        ("text", _address), ("heads", _EACH), ("previous", _EACH),
        *((name, _number) for name in ("mask", "shift", "oldest", "end", "begin")),
    ]  # fmt: skip

    @classmethod
    def of(
        cls,
        text: np.ndarray,
        heads: Sequence[np.ndarray],
        previous: Sequence[np.ndarray],
        mask: int,
        shift: int,
    ) -> IndexFields:
        lists = (_EACH(*(each.ctypes.data for each in one)) for one in (heads, previous))
        fields = cls(text.ctypes.data, *lists, mask, shift)
        fields.held = text, heads, previous
        return fields


class TableFields(ctypes.Structure):
    """Sorted keys, with the token and the share of each."""

    _fields_ = [*((name, _address) for name in ("keys", "tokens", "shares")), ("count", _number)]

    @classmethod
    def of(cls, *arrays: np.ndarray) -> TableFields:
        fields = cls(*(each.ctypes.data for each in arrays), len(arrays[0]))
        fields.held = arrays
        return fields


@cache
def searches() -> tuple[Any, Any] | None:
    """The functions of `extended` and `drafted`; None without a compiler."""
    extend = function_of(SOURCE, "extend", "ppn")
    draft = function_of(SOURCE, "draft", "ppppnndddp", result="n")
    return None if extend is None else (extend, draft)


def extended(extend: Any, index: IndexFields, tokens: Sequence[int]) -> None:
    """Appends `tokens` to the newest text of an index, which has room for them."""
    extend(ctypes.byref(index), (_number * len(tokens))(*tokens), len(tokens))


def drafted(
    search: tuple[Any, Any],
    own: IndexFields,
    shared: IndexFields | None,
    table: TableFields | None,
    context: Sequence[int],
    k: int,
    cautions: tuple[float, float],
    least: float,
) -> tuple[list[int], float]:
    """At most `k` tokens behind `context`, until the chance that all are kept is below `least`, and
    how many are expected to be; `cautions` of the own text and of the shared ones."""
    count, score = len(context), ctypes.c_double()
    text = (_number * (count + k))(*context)
    found = search[1](
        *(None if one is None else ctypes.byref(one) for one in (own, shared, table)),
        text, count, k, *cautions, least, ctypes.byref(score),
    )  # fmt: skip
    return text[count : count + found], score.value
