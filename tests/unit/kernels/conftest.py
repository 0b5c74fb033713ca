"""Kernel tests run interpreted on a machine without CUDA (tests/conftest.py sees to it), compiled
on one with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tests.interpreted import language_patched_once


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def interpreted_faster() -> Iterator[None]:
    with nullcontext() if os.environ["TRITON_INTERPRET"] == "0" else language_patched_once():
        yield


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` full of NaN (or a huge integer): what a kernel forgets to write shows."""
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> torch.Tensor:
        tensor = empty(*args, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)
