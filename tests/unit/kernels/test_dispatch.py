from __future__ import annotations

import importlib.util

import pytest
import torch

from draftsmith.kernels import dispatch
from draftsmith.kernels.dispatch import choose
from draftsmith.kernels.sampling.draw import draw
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.random_streams import Purpose

CPU, CUDA, F32 = torch.device("cpu"), torch.device("cuda"), torch.float32


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def test_auto_is_triton_on_cuda_only(compiled: None) -> None:
    assert (choose("auto", CPU, F32), choose("auto", CUDA, F32)) == ("torch", "triton")
    assert choose("torch", CUDA, F32) == "torch"


def test_float64_is_torchs_unless_asked_for(compiled: None) -> None:
    """The Triton kernels compute in float32."""
    assert [choose("auto", CUDA, dtype) for dtype in (torch.float64, torch.bfloat16)] == [
        "torch",
        "triton",
    ]
    assert choose("triton", CUDA, torch.float64) == "triton"


def test_auto_stays_torch_on_a_cpu_that_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (choose("auto", CPU, F32), choose("triton", CPU, F32)) == ("torch", "triton")


def test_triton_that_cannot_run_raises(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        choose("triton", CPU, F32)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed"):
        choose("triton", CUDA, F32)
    assert choose("auto", CUDA, F32) == "torch"


def test_unknown_names_are_listed() -> None:
    with pytest.raises(ValueError, match=", ".join(dispatch.IMPLS)):
        choose("cuda", CPU, F32)


def test_an_operation_takes_its_arguments_by_name() -> None:
    given = {
        "logits": torch.randn(2, 40),
        "rows": SamplingRows.of([0.7, 1.0]),
        "seeds": torch.tensor([1, 2]),
        "positions": torch.tensor([5, 6]),
        "purpose": Purpose.BONUS,
    }
    found, expected = draw(**given), draw(*given.values(), impl="torch")
    assert torch.equal(found.tokens, expected.tokens)
    with pytest.raises(TypeError, match="no tensor"):
        draw()
