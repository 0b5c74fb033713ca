"""Kernel tests run interpreted on a machine without CUDA (tests/conftest.py sees to it), compiled
on one with it."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def members_looked_up_once() -> Iterator[None]:
    """Triton's interpreter looks through all members of `triton.language` for its builtins at each
    call of each function, which takes longer than most of our kernels at the tests' sizes."""
    if os.environ["TRITON_INTERPRET"] == "0":
        yield
        return
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


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` full of NaN (or a huge integer): what a kernel forgets to write shows."""
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> torch.Tensor:
        tensor = empty(*args, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)
