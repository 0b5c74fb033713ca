from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable

import pytest
import torch

from draftsmith.kernels import dispatch
from draftsmith.kernels.attention.paged import attention_context
from draftsmith.kernels.dispatch import BACKENDS, Upload, choose, sent
from draftsmith.kernels.divergence.rows import divergence_terms
from draftsmith.kernels.sampling.draw import draw, draw_several
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.logged import prob_arrays
from draftsmith.kernels.sampling.random_streams import Purpose, uniforms
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain, verify_logits
from draftsmith.kernels.verify.tree import verify_tree

CPU, CUDA, F32 = torch.device("cpu"), torch.device("cuda"), torch.float32

REFERENCES: tuple[Callable, ...] = (
    verify_chain, verify_logits, verify_block, verify_tree, process, draw, draw_several, uniforms,
    prob_arrays, attention_context, divergence_terms,
)  # fmt: skip
# Of the reference alone, and of kernels.
OWN, FURTHER = {"impl", "draws"}, {"block", "most"}


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


def test_nothing_is_sent_of_no_columns() -> None:
    assert sent(torch.device("cpu")) == ()
    assert [part.tolist() for part in sent(torch.device("cpu"), [1], [])] == [[1], []]


def test_columns_that_were_not_foreseen_are_sent() -> None:
    upload = Upload(CPU, [([1, 2], [3]), ([4],)], sent(CPU, [1, 2], [3], [4]))
    for columns in (([4],), ([5],), ([1, 2], [3]), ([1, 2], [9])):
        assert [part.tolist() for part in upload.of(*columns)] == list(columns)


def test_every_operation_of_the_table_is_a_reference_and_no_other() -> None:
    assert {reference.__name__ for reference in REFERENCES} == set(BACKENDS)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda one: one.__name__)
def test_what_stands_beside_a_reference_takes_its_arguments(reference: Callable) -> None:
    wanted = [name for name in inspect.signature(reference).parameters if name not in OWN]
    places = [place for place in BACKENDS[reference.__name__] if place]
    assert places
    for place in places:
        module, _, name = place.partition(":")
        function = getattr(importlib.import_module(f"draftsmith.kernels.{module}"), name)
        found = inspect.signature(function).parameters
        assert [name for name in found if name not in FURTHER] == wanted, place


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
