"""Products of narrow types by float32 arithmetic against float64, and where they are taken."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from draftsmith.kernels.measured import Choices
from draftsmith.kernels.products.narrow_products import LEAST_ROWS, NARROW, faster_linears, widened

ROWS = LEAST_ROWS + 5
CPU = torch.device("cpu")


def preferring(way: str, folder: Path) -> Choices:
    return Choices(folder, lambda name, run: 1.0 if name == way else 2.0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


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


def test_layers_of_many_rows_are_widened_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.Linear(96, 40, dtype=torch.bfloat16).requires_grad_(False)
    rows, calls = normal(ROWS, 96).bfloat16(), []

    def counted(*given: torch.Tensor) -> torch.Tensor:
        calls.append(len(given[0]))
        return widened(*given)

    monkeypatch.setattr("draftsmith.kernels.products.narrow_products.widened", counted)
    with faster_linears(CPU, torch.bfloat16, preferring("float32", tmp_path / "wide")):
        found = layer(rows)
        layer(rows[: LEAST_ROWS - 1])
        layer.float()(rows.float())
        with torch.autocast("cpu", torch.bfloat16):
            layer(rows)
    assert calls.count(ROWS) == len(calls) - 1  # one of the timed product
    layer.bfloat16()
    assert torch.equal(found, widened(rows, layer.weight, layer.bias))
    own = faster_linears(CPU, torch.bfloat16, preferring("torch", tmp_path / "own"))
    assert isinstance(own, nullcontext)


def test_other_devices_types_and_autocast_get_an_empty_context(tmp_path: Path) -> None:
    choices = preferring("float32", tmp_path)
    assert not isinstance(faster_linears(CPU, torch.bfloat16, choices), nullcontext)
    assert isinstance(faster_linears(CPU, torch.float32, choices), nullcontext)
    for name in ("cuda", "meta"):
        assert isinstance(faster_linears(torch.device(name), torch.bfloat16, choices), nullcontext)
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(faster_linears(CPU, torch.bfloat16, choices), nullcontext)
