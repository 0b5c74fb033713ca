"""Joined linears on packed weights equal plain ones for any number of rows, of which oneDNN meets
few."""

from __future__ import annotations

import pytest
import torch

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
