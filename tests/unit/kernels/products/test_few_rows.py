"""Products of a few rows against float64, whatever the shape, and each row's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.kernels import host_compiler
from draftsmith.kernels.host_compiler import DTYPES
from draftsmith.kernels.measured import Choices
from draftsmith.kernels.products import few_rows as module
from draftsmith.kernels.products.few_rows import MOST_ROWS, FewRows, few_rows
from draftsmith.kernels.products.readings import CANDIDATES, LEAST_BYTES

pytestmark = pytest.mark.skipif(
    module._kernel(torch.float32) is None, reason="there is no C++ compiler"
)

# Of the norm of a row. float32 sums of 512 products, then of parts; bfloat16 rounds the result.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
# (outputs, width): one group of 48 and its neighbours, one part of 512 and its neighbours.
SHAPES = [(1, 2), (16, 6), (17, 6), (33, 8), (47, 510), (48, 512), (49, 514), (100, 1538), (256, 4)]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Kernels that a test has replaced are made again for the next one."""
    yield
    forget()


def forget() -> None:
    for made in (host_compiler.function_of, host_compiler.compiled):
        made.cache_clear()


def case(
    outputs: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, weight, bias)"""
    generator = torch.Generator().manual_seed(outputs + width)
    shapes = ((MOST_ROWS, width), (outputs, width), (outputs,))
    rows, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return rows, weight, bias


def made(weight: torch.Tensor, bias: torch.Tensor | None) -> FewRows:
    found = few_rows(weight, bias)
    assert found is not None
    return found


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_products_are_those_of_float64(outputs: int, width: int, dtype: torch.dtype) -> None:
    rows, weight, bias = case(outputs, width, dtype)
    exact = rows.double() @ weight.double().T
    # Results that nearly cancel have the error of their terms.
    norms = rows.double().norm(dim=-1, keepdim=True) * weight.double().norm(dim=-1)
    for offset in (None, bias):
        found = made(weight, offset)(rows)
        whole = exact if offset is None else exact + offset.double()
        assert found.dtype == dtype and found.shape == whole.shape
        room = TOLERANCE[dtype] * (norms + whole.abs())
        assert ((found.double() - whole).abs() <= room).all()
    # The control: the last weight of the last output is read.
    weight[-1, -1] += 8
    changed = made(weight, None)(rows)
    assert not torch.equal(changed[:, -1], made(case(outputs, width, dtype)[1], None)(rows)[:, -1])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_rows_product_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    rows, weight, bias = case(100, 1538, dtype)
    linear = made(weight, bias)
    together = linear(rows)
    for count in range(1, MOST_ROWS + 1):
        assert torch.equal(linear(rows[-count:]), together[-count:])
    rows[3, 7] = float("nan")
    found = linear(rows)
    assert found[3].isnan().all()
    others = [index for index in range(MOST_ROWS) if index != 3]
    assert torch.equal(found[others], together[others])


def reading_with(choose: Callable[[str], bool], folder: Path) -> Choices:
    """Choices to which the readings seem fastest whose names are as `choose` wants them."""
    return Choices(folder, lambda name, way: 1.0 if choose(name) else 2.0)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("outputs", [48, 200, 480])
def test_every_way_to_read_weights_has_the_same_bits(
    dtype: torch.dtype, outputs: int, tmp_path: Path
) -> None:
    rows, weight, bias = case(outputs, 1538, dtype)
    plain, names = made(weight, bias), {one.name for one in CANDIDATES}
    assert len(names) == len(CANDIDATES) >= 10
    for index, name in enumerate(sorted(names)):
        choices = reading_with(name.__eq__, tmp_path / str(index))
        other = few_rows(weight, bias, pass_bytes=LEAST_BYTES, choices=choices)
        assert other is not None
        for count in (1, 2, 3, 4, 5, 16, 17, MOST_ROWS):
            assert torch.equal(other(rows[:count]), plain(rows[:count])), name
    # The control: the readings differ.
    assert other.readings != plain.readings


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, MOST_ROWS), st.integers(1, 130), st.integers(1, 700), st.sampled_from([1, 2, 3])
)
def test_any_shape_equals_plain_layers(count: int, outputs: int, width: int, threads: int) -> None:
    rows, weight, bias = case(outputs, width, torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = made(weight, bias)(rows[:count])
    finally:
        torch.set_num_threads(before)
    expected = torch.nn.functional.linear(rows[:count], weight, bias)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_processors_without_wide_registers_have_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    rows, weight, bias = case(100, 1538, dtype)
    here = made(weight, bias)(rows)
    forget()
    plain = tuple(flag for flag in host_compiler.FLAGS if flag != "-march=native")
    assert len(plain) == len(host_compiler.FLAGS) - 1
    monkeypatch.setattr(host_compiler, "FLAGS", plain)
    found = made(weight, bias)
    for count in (1, 2, 3, MOST_ROWS):
        torch.testing.assert_close(
            found(rows[:count]), here[:count], rtol=2 * TOLERANCE[dtype], atol=1e-4
        )


def test_rows_of_any_layout_and_dimension() -> None:
    rows, weight, _ = case(20, 24, torch.float32)
    linear = made(weight.T.contiguous().T, None)
    shaped = rows[:32].T.contiguous().T.view(2, 4, 4, 24)
    found = linear(shaped)
    assert found.shape == (2, 4, 4, 20)
    torch.testing.assert_close(found, shaped @ weight.T, rtol=1e-5, atol=1e-5)
    assert linear(rows[:0]).shape == (0, 20)


@pytest.mark.parametrize("rows", [torch.ones(2, 12), torch.ones(2, 24, dtype=torch.bfloat16)])
def test_rows_that_the_kernel_would_misread_are_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="give width 24"):
        made(torch.ones(5, 24), None)(rows)


def test_overflow_and_ties_round_as_torch_does() -> None:
    weight = torch.eye(2).bfloat16()
    largest = torch.finfo(torch.bfloat16).max
    rows = torch.tensor([[largest, -largest], [1.0, 2.0**-7]]).bfloat16()
    bias = torch.tensor([largest, -(2.0**-9)]).bfloat16()
    found = made(weight, bias)(rows)
    assert torch.equal(found, (rows.float() + bias.float()).bfloat16())
    assert found[0, 0] == float("inf")


def test_what_the_kernel_does_not_know_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    assert few_rows(torch.ones(4, 3).bfloat16(), None) is None  # an odd width
    assert few_rows(torch.ones(4, 4).half(), None) is None
    monkeypatch.setattr(module, "function_of", lambda *given, **others: None)
    assert few_rows(torch.ones(4, 4), None) is None
