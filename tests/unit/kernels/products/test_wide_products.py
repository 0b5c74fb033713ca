"""Many rows of a narrow type are never multiplied several times slower than float32."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import linear

from draftsmith.kernels.products.float32_products import NARROW, faster_linears, widened

CPU = torch.device("cpu")
ROWS = 192


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("biased", [True, False])
def test_sums_are_rounded_once(dtype: torch.dtype, biased: bool) -> None:
    rows, weight = normal(2, ROWS, 96, dtype=dtype), normal(40, 96, dtype=dtype)
    bias = normal(40, dtype=dtype) if biased else None
    exact = linear(rows.double(), weight.double(), None if bias is None else bias.double())
    found = widened(rows, weight, bias)
    assert found.dtype == dtype and found.shape == (2, ROWS, 40)
    step = torch.finfo(dtype).eps / 2
    assert ((found.double() - exact).abs() <= exact.abs() * step + 1e-4).all()


def test_passes_in_the_type_itself_go_on_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(faster_linears(CPU, torch.bfloat16), nullcontext)
