"""Triton's interpreter as a device: rounding as devices round."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def members_looked_up_once() -> Iterator[None]:
    """The interpreter looks through all members of `triton.language` for its builtins at each call
    of each function, which takes longer than most of our kernels at the tests' sizes."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    is_builtin, patch_attr = interpreter.tl.core.is_builtin, interpreter._patch_attr

    @functools.cache
    def names(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: Any, *rest: Any) -> None:
        for name in names(package):
            # Within a call it is one no more.
            if is_builtin(member := getattr(package, name)):
                patch_attr(package, name, member, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield


@contextmanager
def rounding_to_nearest() -> Iterator[None]:
    """The interpreter cuts float32 to bfloat16 off; devices round it to the nearest, to even."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    convert, types = interpreter._convert_float, interpreter.tl

    def rounded(numbers: Any, source: Any, wanted: Any, mode: Any) -> Any:
        if (source, wanted) != (types.float32, types.bfloat16):
            return convert(numbers, source, wanted, mode)
        narrow = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.bfloat16)
        return narrow.view(torch.int16).numpy().view(np.uint16).reshape(numbers.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        yield
