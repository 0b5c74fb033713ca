"""Products of many rows in float32 against float64, with their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from draftsmith.kernels.measured import Choices
from draftsmith.kernels.products import float32_products as module
from draftsmith.kernels.products.float32_products import (
    KERNEL,
    LEAST_ROWS,
    MOST_WIDTH,
    NARROW,
    choose,
    faster_linears,
    is_faster,
    multiply,
    widened,
)

ROWS = LEAST_ROWS + 5
CPU = torch.device("cpu")
# Of the norm of the terms: float32 sums of 512 products, then of parts.
TOLERANCE = 2e-6


def preferring(way: str, folder: Path) -> Choices:
    return Choices(folder, lambda name, run: 1.0 if name == way else 2.0)


@pytest.fixture
def everywhere(tmp_path: Path) -> Iterator[None]:
    """The kernel is asked on every processor, not only where it is faster."""
    if not choose(preferring(KERNEL, tmp_path)):
        pytest.skip("there is no C++ compiler")
    yield
    choose()


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
        with faster_linears(CPU):
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
    with faster_linears(CPU):
        found = model(rows)
    assert not found.requires_grad
    torch.testing.assert_close(found, model(rows), rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(module, "_product", None)
    with torch.autocast("cpu", torch.bfloat16), faster_linears(CPU) as mode:
        assert mode is None and model(rows).dtype == torch.bfloat16
    with faster_linears(CPU), torch.autocast("cpu", torch.bfloat16):
        assert model(rows).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "rows, weight, bias",
    [
        ((100, 64), (33, 48), None),
        ((96, 64), (33, 48), None),  # as many numbers as 128 rows of width 48
        ((100, 64), (33, 64), 5),
        ((64, 1), (1, 4_000_000), None),
    ],
)
def test_sizes_that_do_not_fit_are_refused_as_torch_does(
    everywhere: None, rows: tuple[int, ...], weight: tuple[int, ...], bias: int | None
) -> None:
    a, b = torch.ones(rows), torch.ones(weight)
    c = None if bias is None else torch.ones(bias)
    with faster_linears(CPU), pytest.raises(RuntimeError):
        torch.nn.functional.linear(a, b, c)
    if bias is None:
        assert not is_faster(a, b.T)
        with pytest.raises(RuntimeError):
            multiply(a, b.T)


def test_widths_of_nothing_and_of_too_much_are_torchs(
    everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_product", None)
    with faster_linears(CPU):
        nothing = torch.nn.functional.linear(torch.ones(ROWS, 0), torch.ones(5, 0))
        assert torch.equal(nothing, torch.zeros(ROWS, 5))
        one = torch.ones(1, 1)  # read again and again, [64, MOST_WIDTH + 1] without its memory
        wide = one.expand(LEAST_ROWS, MOST_WIDTH + 1), one.expand(1, MOST_WIDTH + 1)
        assert not is_faster(wide[0], wide[1].T) and not module._takes(*wide)
    assert torch.equal(multiply(torch.ones(ROWS, 0), torch.ones(0, 5)), nothing)
    assert not is_faster(torch.ones(ROWS, 3), torch.ones(3))


def test_other_devices_get_an_empty_context(everywhere: None) -> None:
    assert not isinstance(faster_linears(CPU), nullcontext)
    for name in ("cuda", "meta"):
        assert isinstance(faster_linears(torch.device(name)), nullcontext)


# Narrow types


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("biased", [True, False])
def test_sums_are_rounded_once(dtype: torch.dtype, biased: bool) -> None:
    rows, weight = normal(2, ROWS, 96).to(dtype), normal(40, 96).to(dtype)
    bias = normal(40).to(dtype) if biased else None
    exact = linear(rows.double(), weight.double(), None if bias is None else bias.double())
    found = widened(rows, weight, bias)
    assert found.dtype == dtype and found.shape == (2, ROWS, 40)
    step = torch.finfo(dtype).eps / 2
    assert ((found.double() - exact).abs() <= exact.abs() * step + 1e-4).all()


def test_passes_in_the_type_itself_go_on_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(faster_linears(CPU, torch.bfloat16), nullcontext)
