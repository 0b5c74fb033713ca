"""Joined linears on packed weights equal plain ones for any number of rows, of which oneDNN meets
few."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.compiled import half_linear
from draftsmith.drafters.compiled.packed_linear import PackedLinear, padded_rows


@pytest.mark.parametrize("shape", [(1,), (16,), (17,), (63,), (65,), (200,), (1, 130), (2, 3, 9)])
def test_rows_of_any_number_equal_plain_layers(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, 24, generator=generator) for size in (8, 40)]
    biases = [torch.randn(8, generator=generator), None]
    rows = torch.randn(*shape, 24, generator=generator)
    with torch.inference_mode():
        found = PackedLinear(weights, biases)(rows)
        expected = [
            torch.nn.functional.linear(rows, weight, bias) for weight, bias in zip(weights, biases)
        ]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_few_numbers_of_rows_reach_the_library() -> None:
    """It keeps kernels for each: memory would grow with every length of prompt."""
    met = {padded_rows(count) for count in range(1, 513)}
    assert len(met) == 29 and all(padded_rows(count) >= count for count in range(1, 513))
    assert [padded_rows(count) for count in (1, 16, 17, 64, 65, 512)] == [1, 16, 24, 64, 128, 512]


def test_rows_that_need_no_padding_are_not_copied() -> None:
    packed, multiplied = PackedLinear([torch.ones(8, 24)], [None]), []
    multiply = packed._multiply
    packed._multiply = lambda rows: multiplied.append(rows) or multiply(rows)  # type: ignore
    for count, same in ((16, True), (63, False), (64, True)):
        rows = torch.ones(1, count, 24)
        with torch.inference_mode():
            packed(rows)
        assert (multiplied[-1].data_ptr() == rows.data_ptr()) is same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_row_of_wide_weights_follows_weights_written_in_place(dtype: torch.dtype) -> None:
    """One row is multiplied with the weights as they are stored (float32) or as float16 (bfloat16),
    more rows with packed ones; all are refreshed."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, 2048, generator=generator).to(dtype) for size in (8, 24)]
    bias = torch.randn(24, generator=generator).to(dtype)
    packed = PackedLinear(weights, [None, bias], half=True)
    for scale in (1.0, 3.0):
        with torch.inference_mode():
            for weight in weights:
                weight.mul_(scale)
        packed.refresh()
        rows = torch.randn(4, 1, 2048, generator=generator).to(dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        for part in (rows[:1], rows):
            with torch.inference_mode():
                first, second = packed(part)
            expected = part.double() @ weights[1].double().T + bias.double()
            assert first.shape == (*part.shape[:-1], 8) and first.dtype == dtype
            norm = (second.double() - expected).norm() / expected.norm()
            assert norm.item() < tolerance
    packed._multiply = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        packed(rows)
    if dtype == torch.float32 or half_linear.available():
        packed(rows[:1])


@pytest.mark.skipif(not half_linear.available(), reason="this torch has no FBGEMM")
def test_without_memory_for_a_further_copy_single_rows_are_multiplied_as_others() -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert PackedLinear([weight], [None], half=True)._half is not None
    spare = PackedLinear([weight], [None])
    assert spare._half is None
    with torch.inference_mode():
        torch.testing.assert_close(spare(weight[:1])[0], weight[:1] @ weight.T, rtol=0.02, atol=0.1)
