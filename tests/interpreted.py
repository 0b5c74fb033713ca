"""Triton's interpreter as a device: rounding as devices round."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def language_patched_once() -> Iterator[None]:
    """The interpreter replaces `triton.language` at each launch and, without putting it back, at each
    call of a device function, looks for a type's numpy type in a table made anew, and wraps every
    tensor's sizes anew; that takes twice as long as the rest at the tests' sizes."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch_lang, numpy_type, scopes = interpreter._patch_lang, interpreter._get_np_dtype, []
    languages, patched = {id(interpreter.tl), id(interpreter.tl.core)}, set[int]()

    @functools.cache
    def seen_by(fn: Any) -> set[int]:
        return languages & set(map(id, fn.__globals__.values()))

    def patch_missing(fn: Any) -> Any:
        if seen_by(fn) - patched:
            scopes.append(patch_lang(fn))
            patched.update(seen_by(fn))
        return interpreter._LangPatchScope()

    known: dict[str, np.dtype] = {}

    def known_type(kind: Any) -> np.dtype:
        if (found := known.get(kind.name)) is None:
            found = known[kind.name] = numpy_type(kind)
        return found

    tensor = interpreter.tl.tensor
    whole, sizes = tensor.__init__, dict[str, tuple[Any, Any]]()

    def with_known_sizes(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in sizes:
            whole(self, handle, kind)
            sizes[kind.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = sizes[kind.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "__init__", with_known_sizes)
        patch.setattr(interpreter, "_patch_lang", patch_missing)
        patch.setattr(interpreter, "_get_np_dtype", known_type)
        try:
            yield
        finally:
            while scopes:
                scopes.pop().restore()


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
