"""Kernel tests run interpreted on a machine without CUDA, compiled on one with it: the same tests, the same shapes."""

from __future__ import annotations

import os

import pytest
import torch

# Triton reads it when a kernel is defined, so it is set before any test module is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` full of NaN (or a huge integer): what a kernel forgets to write shows."""
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> torch.Tensor:
        tensor = empty(*args, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)
