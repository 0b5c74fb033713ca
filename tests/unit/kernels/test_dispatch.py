from __future__ import annotations

import importlib.util

import pytest
import torch

from draftsmith.kernels import dispatch
from draftsmith.kernels.dispatch import choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def test_auto_is_triton_on_cuda_only(compiled: None) -> None:
    assert (choose("auto", CPU), choose("auto", CUDA)) == ("torch", "triton")
    assert choose("torch", CUDA) == "torch"


def test_auto_stays_torch_on_a_cpu_that_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (choose("auto", CPU), choose("triton", CPU)) == ("torch", "triton")


def test_triton_that_cannot_run_raises(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        choose("triton", CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed"):
        choose("triton", CUDA)
    assert choose("auto", CUDA) == "torch"


def test_unknown_names_are_listed() -> None:
    with pytest.raises(ValueError, match=", ".join(dispatch.IMPLS)):
        choose("cuda", CPU)
