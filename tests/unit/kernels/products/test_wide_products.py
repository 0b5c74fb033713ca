"""Many rows of a narrow type are never multiplied several times slower than float32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch.nn.functional import linear

from draftsmith.drafters.compiled.packed_linear import PackedLinear
from draftsmith.kernels.measured import VARIABLE, Choices
from draftsmith.kernels.products.float32_products import NARROW, faster_linears, widened, widens

CPU = torch.device("cpu")
ROWS = 192
MOST_TIMES = 3.0  # float32's; torch's own were 6 and more without instructions for the type


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


@pytest.mark.parametrize("fastest", ["torch", "float32"])
def test_the_faster_product_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    choices = Choices(tmp_path, lambda name, way: 1.0 if name == fastest else 2.0)
    assert [widens(dtype, choices) for dtype in NARROW] == [fastest == "float32"] * len(NARROW)
    assert not widens(torch.float32, choices)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_narrow_type_costs_about_what_float32_does(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    rows, weight = normal(ROWS, 1024, dtype=dtype), normal(1024, 1024, dtype=dtype)
    wide_rows, wide_weight = rows.float(), weight.float()
    packed = PackedLinear([weight], [None])
    with torch.no_grad():
        plain_s = least_s(lambda: linear(wide_rows, wide_weight))
        packed_s = least_s(lambda: packed(rows)[0])
        with faster_linears(CPU, dtype):
            whole_s = least_s(lambda: linear(rows, weight))
    assert max(packed_s, whole_s) < MOST_TIMES * plain_s


def least_s(work: Callable[[], object]) -> float:
    def once() -> float:
        begun_s = perf_counter()
        work()
        return perf_counter() - begun_s

    return min(once() for _ in range(5))


def test_passes_in_the_type_itself_go_on_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(faster_linears(CPU, torch.bfloat16), nullcontext)
