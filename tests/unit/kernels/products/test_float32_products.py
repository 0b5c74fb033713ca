"""Products of many rows in float32 against float64, with their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from draftsmith.kernels.products import float32_products as module
from draftsmith.kernels.products.float32_products import (
    LEAST_ROWS,
    faster_linears,
    is_faster,
    multiply,
)

ROWS = LEAST_ROWS + 5
# Of the norm of the terms: float32 sums of 512 products, then of parts.
TOLERANCE = 2e-6


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel is asked on every processor, not only where it is faster."""
    monkeypatch.setattr(module, "_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    module._kernel.cache_clear()
    if module._kernel() is None:
        pytest.skip("there is no C++ compiler")
    yield
    module._kernel.cache_clear()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def error(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    norms = a.double().norm(dim=-1, keepdim=True) * b.double().norm(dim=0)
    return float(((found.double() - a.double() @ b.double()).abs() / norms).max())


@pytest.mark.parametrize("width, count", [(1, 1), (7, 16), (33, 45), (513, 100), (256, 48)])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_products_are_those_of_float64(
    everywhere: None, width: int, count: int, turned: tuple[bool, bool]
) -> None:
    a, b = normal(ROWS, width), normal(width, count)
    a, b = (one.T.contiguous().T if flip else one for one, flip in zip((a, b), turned))
    assert is_faster(a, b)
    assert error(multiply(a, b), a, b) < TOLERANCE


def test_one_product_left_out_is_noticed(everywhere: None) -> None:
    """Control of the test above."""
    a, b = normal(ROWS, 513), normal(513, 100)
    lacking = a.clone()
    lacking[:, -1] = 0
    assert error(multiply(lacking, b), a, b) > TOLERANCE


def test_a_part_of_a_tensor_is_multiplied_as_it_is(everywhere: None) -> None:
    whole, b = normal(ROWS, 40), normal(20, 30)
    a = whole[:, 5:25]
    assert error(multiply(a, b), a, b) < TOLERANCE
    strided = normal(40, 30)[5:25, 3:20]
    assert error(multiply(a, strided), a, strided) < TOLERANCE


def test_a_row_does_not_depend_on_the_others(everywhere: None) -> None:
    a, b = normal(3 * ROWS, 70), normal(70, 50)
    assert torch.equal(multiply(a, b)[ROWS : 2 * ROWS], multiply(a[ROWS : 2 * ROWS], b))


def test_other_matrices_are_torchs(everywhere: None) -> None:
    a, b = normal(ROWS, 6), normal(6, 4)
    assert is_faster(a, b)
    assert not is_faster(a[: LEAST_ROWS - 1], b)
    assert not is_faster(a.double(), b.double())
    assert not is_faster(a.bfloat16(), b.bfloat16())
    assert torch.equal(multiply(a[:3], b), a[:3] @ b)


@pytest.mark.parametrize(
    "vendor, capability", [("GenuineIntel", "AVX512"), ("AuthenticAMD", "AVX2")]
)
def test_other_processors_keep_torchs_products(
    monkeypatch: pytest.MonkeyPatch, vendor: str, capability: str
) -> None:
    monkeypatch.setattr(module, "_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    module._kernel.cache_clear()
    try:
        assert not is_faster(normal(ROWS, 6), normal(6, 4))
        assert isinstance(faster_linears(), nullcontext)
    finally:
        module._kernel.cache_clear()


def layers(has_bias: bool) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(70, 80, bias=has_bias), torch.nn.SiLU(), torch.nn.Linear(80, 66, has_bias)
    )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_linear_layers_and_their_gradients(
    everywhere: None, monkeypatch: pytest.MonkeyPatch, has_bias: bool, recomputes: bool
) -> None:
    calls = []
    product = module._product
    monkeypatch.setattr(module, "_product", lambda *of: calls.append(1) or product(*of))
    model, exact = layers(has_bias), layers(has_bias).double()
    rows = normal(2, ROWS, 70).requires_grad_()
    rows_64 = rows.detach().double().requires_grad_()

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with faster_linears():
            return model(inputs)

    found = checkpoint(forward, rows, use_reentrant=False) if recomputes else forward(rows)
    expected = exact(rows_64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    slope = normal(2, ROWS, 66)
    found.backward(slope)
    expected.backward(slope.double())
    assert len(calls) == (2 + 2 if recomputes else 2) + 4
    pairs = [(rows, rows_64), *zip(model.parameters(), exact.parameters(), strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_frozen_layers_and_autocast(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers(has_bias=True).requires_grad_(False)
    rows = normal(ROWS, 70)
    with faster_linears():
        found = model(rows)
    assert not found.requires_grad
    torch.testing.assert_close(found, model(rows), rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(module, "_product", None)
    with torch.autocast("cpu", torch.bfloat16), faster_linears():
        assert model(rows).dtype == torch.bfloat16
