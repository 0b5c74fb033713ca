"""Joined linears on packed weights equal plain ones for any number of rows, of which oneDNN meets
few."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.drafters.compiled import packed_linear
from draftsmith.drafters.compiled.packed_linear import KERNEL, PACKED, PLAIN, PackedLinear
from draftsmith.kernels.measured import Choices
from draftsmith.kernels.products.few_rows import MOST_ROWS, few_rows
from draftsmith.kernels.products.readings import LEAST_BYTES

ENOUGH = LEAST_BYTES  # for a choice to be made by time
needs_compiler = pytest.mark.skipif(
    few_rows(torch.ones(1, 2), None) is None, reason="there is no C++ compiler"
)


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


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_of_rows_follows_weights_written_in_place(
    dtype: torch.dtype, copies: int
) -> None:
    """Few rows and many have layouts of their own; all are refreshed."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, 64, generator=generator).to(dtype) for size in (8, 24)]
    bias = torch.randn(24, generator=generator).to(dtype)
    packed = PackedLinear(weights, [None, bias], copies=copies)
    for scale in (1.0, 3.0):
        with torch.inference_mode():
            for weight in weights:
                weight.mul_(scale)
        packed.refresh()
        rows = torch.randn(MOST_ROWS + 4, 1, 64, generator=generator).to(dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        for part in (rows[:1], rows[:MOST_ROWS], rows):
            with torch.inference_mode():
                first, second = packed(part)
            expected = part.double() @ weights[1].double().T + bias.double()
            assert first.shape == (*part.shape[:-1], 8) and first.dtype == dtype
            norm = (second.double() - expected).norm() / expected.norm()
            assert norm.item() < tolerance


def preferring(way: str, folder: Path) -> Choices:
    return Choices(folder, lambda name, run: 1.0 if name == way else 2.0)


@needs_compiler
@pytest.mark.parametrize("way", [PACKED, PLAIN, KERNEL])
def test_the_fastest_way_multiplies_many_rows(tmp_path: Path, way: str) -> None:
    """oneDNN's copy is made only where it is used; few rows have the same bits for all."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(40, 24, generator=generator) for _ in range(2)]
    biases = [torch.randn(40, generator=generator), None]
    plain = PackedLinear(weights, biases)
    packed = PackedLinear(weights, biases, pass_bytes=ENOUGH, choices=preferring(way, tmp_path))
    assert packed.way == way and (packed._packed is None) == (way != PACKED)
    rows = torch.randn(1, MOST_ROWS + 3, 24, generator=generator)
    with torch.inference_mode():
        found, few, expected = packed(rows), packed(rows[:, :5]), plain(rows)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert all(map(torch.equal, few, plain(rows[:, :5])))
    is_kernels = all(torch.equal(one[:, :5], other) for one, other in zip(found, few, strict=True))
    assert is_kernels or way != KERNEL


def test_without_a_compiler_all_rows_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "few_rows", lambda weight, bias, **more: None)
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    packed = PackedLinear([weight], [None], copies=1)
    with torch.inference_mode():
        for count in (1, 3, 40):
            rows = torch.randn(count, 16)
            torch.testing.assert_close(packed(rows)[0], rows @ weight.T, rtol=1e-4, atol=1e-4)
