"""Products with codes of 8 bits against float64, whatever the shape, and each row's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from draftsmith.kernels import host_compiler
from draftsmith.kernels.measured import Choices
from draftsmith.kernels.products import int8_rows as module
from draftsmith.kernels.products.int8_rows import (
    KERNEL,
    KINDS,
    LARGEST,
    MOST_ROWS,
    OPENED,
    Int8Rows,
    Int8Weight,
    available,
    opened,
    quantised,
)
from draftsmith.kernels.products.readings import LEAST_BYTES, candidates

pytestmark = pytest.mark.skipif(not available(), reason="there is no C++ compiler")

# Of the norms of a row and of an output. float32 sums, then one rounding of the result; more rows
# than the kernel takes are rounded before they are scaled, and after.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
# (outputs, width): one group of 48 and its neighbours, one part of 512 and its neighbours.
SHAPES = [(1, 4), (16, 8), (47, 508), (48, 512), (49, 516), (100, 1540), (256, 4)]
NUM_ROWS = MOST_ROWS + 9


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Kernels that a test has replaced are made again for the next one."""
    yield
    module._kernel.cache_clear()
    host_compiler.compiled.cache_clear()


def case(
    outputs: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, weight, bias)"""
    generator = torch.Generator().manual_seed(outputs + width)
    shapes = ((NUM_ROWS, width), (outputs, width), (outputs,))
    rows, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return rows, weight, bias


def numbers(weight: Int8Weight, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] float64, what the codes and scales stand for."""
    return opened(weight, dtype).double() * weight.scales.double()[:, None]


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_products_are_those_of_float64(outputs: int, width: int, dtype: torch.dtype) -> None:
    check_products(outputs, width, dtype)


def check_products(outputs: int, width: int, dtype: torch.dtype) -> None:
    rows, weight, bias = case(outputs, width, dtype)
    made = quantised(weight, dtype)
    exact = rows.double() @ numbers(made, dtype).T
    # Results that nearly cancel have the error of their terms.
    norms = rows.double().norm(dim=-1, keepdim=True) * weight.double().norm(dim=-1)
    found = Int8Rows([made, made], [None, bias], dtype)
    for count in (1, 2, 3, 7, MOST_ROWS, NUM_ROWS):
        for product, offset in zip(found(rows[:count]), (None, bias.double()), strict=True):
            whole = exact[:count] if offset is None else exact[:count] + offset
            assert product.dtype == dtype and product.shape == whole.shape
            # Of many rows the product is rounded before it is scaled too.
            terms = 1e-6 * norms[:count] if count <= MOST_ROWS else TOLERANCE[dtype] * exact.abs()
            room = terms + 2 * TOLERANCE[dtype] * whole.abs() + 1e-6 * norms[:count]
            assert ((product.double() - whole).abs() <= room).all()


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_codes_are_the_nearest_and_keep_the_largest(
    outputs: int, width: int, dtype: torch.dtype
) -> None:
    _, weight, _ = case(outputs, width, dtype)
    weight[0] = 0
    made = quantised(weight, dtype)
    codes = opened(made, dtype).double()
    assert torch.equal(codes, codes.round()) and codes.abs().max() <= LARGEST
    assert (codes.abs().amax(dim=1)[1:] == LARGEST).all() and (codes[0] == 0).all()
    apart = (numbers(made, dtype) - weight.double()).abs()
    assert (apart <= 0.5001 * made.scales.double()[:, None]).all()


def test_a_weight_takes_a_byte() -> None:
    made = quantised(torch.randn(480, 1024), torch.bfloat16)
    assert made.codes.numel() * made.codes.element_size() == 480 * 1024


@pytest.mark.parametrize("dtype", list(KINDS))
def test_a_rows_product_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    rows, weight, bias = case(100, 1540, dtype)
    product = Int8Rows([quantised(weight, dtype)], [bias], dtype)
    rows = rows[:MOST_ROWS]
    together = product(rows)[0]
    for count in range(1, MOST_ROWS + 1):
        assert torch.equal(product(rows[-count:])[0], together[-count:])
    rows[3, 7] = float("nan")
    found = product(rows)[0]
    assert found[3].isnan().all()
    others = [index for index in range(MOST_ROWS) if index != 3]
    assert torch.equal(found[others], together[others])


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("way", [OPENED, KERNEL])
def test_the_clock_decides_how_codes_are_read(dtype: torch.dtype, way: str, tmp_path: Path) -> None:
    """Few rows have the same bits in every way; many are the fastest's."""
    rows, weight, bias = case(100, 1540, dtype)
    codes = quantised(weight, dtype)
    plain = Int8Rows([codes], [bias], dtype)
    names = {one.name for one in candidates(1, 1)}
    for index, name in enumerate(sorted(names)):
        clock = partial(seconds, {name, way})
        found = Int8Rows(
            [codes], [bias], dtype, pass_bytes=LEAST_BYTES, choices=Choices(tmp_path / name, clock)
        )
        assert found.way() == way
        assert index or found.readings != plain.readings
        for count in (1, 4, 5, 17, MOST_ROWS):
            assert torch.equal(found(rows[:count])[0], plain(rows[:count])[0]), name
    many = found(rows)[0]
    assert torch.equal(many[:MOST_ROWS], found(rows[:MOST_ROWS])[0]) or way == OPENED
    exact = rows.double() @ numbers(codes, dtype).T + bias.double()
    assert (many.double() - exact).norm() / exact.norm() < 2 * TOLERANCE[dtype]


def seconds(fast: set[str], name: str, way: object) -> float:
    return 1.0 if name in fast else 2.0


def test_threads_share_the_outputs_of_several_weights() -> None:
    rows, weight, bias = case(100, 516, torch.float32)
    weights = [quantised(part, torch.float32) for part in weight.split([7, 60, 33])]
    product = Int8Rows(weights, list(bias.split([7, 60, 33])), torch.float32)
    expected = product(rows[:5])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = product(rows[:5])
    finally:
        torch.set_num_threads(before)
    assert [part.shape[-1] for part in found] == [7, 60, 33]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", list(KINDS))
def test_processors_without_wide_registers_have_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    module._kernel.cache_clear()
    host_compiler.compiled.cache_clear()
    plain = tuple(flag for flag in host_compiler.FLAGS if flag != "-march=native")
    assert len(plain) == len(host_compiler.FLAGS) - 1
    monkeypatch.setattr(host_compiler, "FLAGS", plain)
    check_products(100, 1540, dtype)


def test_what_the_kernel_would_misread_is_refused() -> None:
    product = Int8Rows([quantised(torch.ones(5, 24), torch.float32)], [None], torch.float32)
    for rows in (torch.ones(2, 12), torch.ones(2, 24, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="give width 24"):
            product(rows)
    with pytest.raises(ValueError, match="not multiplied as int8"):
        quantised(torch.ones(5, 6), torch.float32)
    with pytest.raises(ValueError, match="not multiplied as int8"):
        quantised(torch.ones(5, 8), torch.float16)
