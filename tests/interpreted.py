"""Triton's interpreter as a device: rounding as devices round, and counts of what they would
launch."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Operations that make memory and fill nothing into it, or only look at what is there.
_MADE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach")
# Operations whose result is a number or a shape that only values tell: the host would wait, and no
# graph can hold them.
READ = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")


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


class Launches(TorchDispatchMode):
    """Counts by name what a device would launch while the mode is on: torch's operations but for
    views and memory, and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::").rstrip("_")
        if not function.is_view and name not in _MADE and name != "_unsafe_view":
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
        run = executor.__call__

        def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[f"triton {kernel.fn.__name__}"] += 1
            with _disable_current_modes():  # the interpreter's own operations
                return run(kernel, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(executor, "__call__", counted)
            yield
