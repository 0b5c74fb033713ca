"""Kernel calls in a list against torch: places, strides and the order of calls."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels import call_list as module
from draftsmith.kernels.call_list import (
    ArgumentPlace,
    CallKind,
    KernelCall,
    RowAddresses,
    at,
    call_list,
)
from draftsmith.kernels.products.few_rows import few_rows
from draftsmith.kernels.products.row_steps import row_steps

needs_compiler = pytest.mark.skipif(
    row_steps(torch.float32) is None, reason="there is no C++ compiler"
)
NO_ROWS = RowAddresses(0, 0, 0, 0, 0, 0, 0, 0)
NO_LAYERS = torch.zeros(0, 2, dtype=torch.int64)


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 5])
def test_calls_read_what_calls_before_them_wrote(tokens: int) -> None:
    x, given = torch.randn(tokens, 6), torch.randn(tokens, 10)
    weight, bias = torch.randn(8, 6), torch.randn(8)
    linear, steps = few_rows(weight, bias), row_steps(torch.float32)
    assert linear is not None and steps is not None
    scratch, out = torch.full((tokens * 40,), 9.0), torch.zeros(tokens, 9)
    product, total = ArgumentPlace(1, 0, 0), ArgumentPlace(1, 8 * 4, 0)
    calls = [
        KernelCall(
            CallKind.MULTIPLY,
            linear.function,
            (ArgumentPlace(2, 0, 0), *map(at, linear.pointers), product),
            (6, 8, linear.readings),
        ),
        # Numbers 1 to 8 of the ten that each token was given.
        KernelCall(
            CallKind.ADD,
            steps.functions["add"],
            (product, ArgumentPlace(3, 0, 4), total),
            (8, 8, 10),
        ),
        KernelCall(CallKind.COPY, None, (total, ArgumentPlace(4, 0, 4)), (8 * 4, 8 * 4, 9 * 4)),
    ]
    run = call_list(calls)
    assert run is not None
    run([0, *(one.data_ptr() for one in (scratch, x, given, out))], tokens, NO_ROWS, NO_LAYERS)
    expected = x @ weight.T + bias + given[:, 1:9]
    torch.testing.assert_close(out[:, 1:], expected)
    assert (out[:, 0] == 0).all() and (scratch[tokens * 16 :] == 9).all()


@needs_compiler
def test_heads_that_lie_apart_are_normalised_token_by_token() -> None:
    steps = row_steps(torch.float32)
    assert steps is not None
    joined, weight, out = torch.randn(3, 20), torch.rand(4), torch.empty(3, 2, 4)
    call = KernelCall(
        CallKind.NORMALISE,
        steps.functions["normalise"],
        (ArgumentPlace(1, 0, 4 * 4), at(weight.data_ptr()), ArgumentPlace(2, 0, 0)),
        (2, 4, 20, 4),
        (1e-5, 0.25),
    )
    run = call_list([call])
    assert run is not None
    run([0, joined.data_ptr(), out.data_ptr()], 3, NO_ROWS, NO_LAYERS)
    heads = joined[:, 4:12].reshape(3, 2, 4)
    assert torch.equal(out, steps.normalise(heads, weight, 1e-5, 0.25))


def test_there_is_no_list_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run", lambda: None)
    assert call_list([]) is None
