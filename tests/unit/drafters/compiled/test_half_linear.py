"""bfloat16 weights as float16: the same products to less than bfloat16's own rounding, or not
done."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.compiled.half_linear import available, half_linear

pytestmark = pytest.mark.skipif(not available(), reason="this torch has no FBGEMM")


def weights(scale: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(40, 96, generator=generator)).bfloat16()


@pytest.mark.parametrize("shape", [(1,), (2,), (1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("scale", [1e-3, 0.02, 8.0])
def test_products_are_those_of_the_weights_rounded_once(
    shape: tuple[int, ...], scale: float
) -> None:
    weight, generator = weights(scale), torch.Generator().manual_seed(1)
    # Of weights down to zero some are subnormal as float16, and some are lost.
    weight[0] *= torch.logspace(0, -9, 96)
    bias = (scale * torch.randn(40, generator=generator)).bfloat16()
    rows = torch.randn(*shape, 96, generator=generator).bfloat16()
    linear = half_linear(weight, bias)
    assert linear is not None
    with torch.inference_mode():
        found = linear(rows)
    exact = rows.double() @ weight.double().T + bias.double()
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    # Half a unit in the last of bfloat16's eight bits, and what tiny weights may add.
    room = exact.abs() * 2.0**-8 + 1e-5 * rows.double().norm(dim=-1, keepdim=True) * scale
    assert ((found.double() - exact).abs() <= room).all()
    # The control: a weight row a fiftieth off is seen.
    weight[3] *= 1.02
    off = found.double() - rows.double() @ weight.double().T - bias.double()
    assert (off.abs() > room)[..., 3].any() and not (off.abs() > room)[..., 4:].any()


@pytest.mark.parametrize(
    "value", [7e4, -1e30, float("inf"), float("nan")], ids=["large", "huge", "infinite", "nan"]
)
def test_weights_that_float16_cannot_hold_are_left(value: float) -> None:
    weight = weights()
    weight[7, 5] = value
    assert half_linear(weight, None) is None


def test_a_row_of_weights_too_small_for_float16_is_left() -> None:
    weight = weights()
    weight[7] *= 1e-6
    assert half_linear(weight, None) is None


def test_other_types_are_left() -> None:
    assert half_linear(weights().float(), None) is None


def test_rows_of_zeros_and_rows_that_float16_holds_exactly_stay() -> None:
    weight = weights()
    weight[3] = 0.0
    weight[7] = 2.0**-20
    assert half_linear(weight, None) is not None
