"""Steps between products in Triton against the several operations that they stand for: to the bit in
half precision but for sums in another order, and against float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import gelu, silu

from draftsmith.kernels.products.row_steps_triton import (
    ACTIVATIONS,
    HeadNorms,
    Norm,
    WrittenKeys,
    add_normalise,
    gate,
    normalise,
    rotate,
    rotate_and_write,
)
from tests.interpreted import rounding_to_nearest

# sigmoid of large negative numbers
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place of the type, relative: what one rounding may be off.
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
OPENED = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}


@pytest.fixture(scope="module", autouse=True)
def rounded() -> Iterator[None]:
    """Interpreted steps round as a device does."""
    with nullcontext() if os.environ["TRITON_INTERPRET"] == "0" else rounding_to_nearest():
        yield


@pytest.fixture
def numbers(device):
    def made(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)

    return made


def own_norm(
    x: torch.Tensor, weight: torch.Tensor | None, norm: Norm, wide_type: torch.dtype = torch.float32
) -> torch.Tensor:
    """As modules of transformers write it."""
    numbers = x.to(wide_type)
    normed = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + norm.eps)
    if weight is None:
        return normed.to(x.dtype)
    if norm.wide:
        return (normed * (norm.offset + weight.to(wide_type))).to(x.dtype)
    return weight * normed.to(x.dtype)


def own_rotation(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return (x * cosine) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sine)


def assert_near(found: torch.Tensor, expected: torch.Tensor, *, ulps: float) -> None:
    """`expected` is float64."""
    error = (found.double() - expected).abs()
    allowed = 2 * ulps * HALF_ULP[found.dtype] * expected.abs() + 1e-7
    assert (error <= allowed).all(), (error / allowed).max()


def share_equal(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    return (found == expected).double().mean().item()


@dtypes
@pytest.mark.parametrize("norm", [Norm(1e-5), Norm(1e-6, 1.0, True)], ids=["llama", "gemma"])
@pytest.mark.parametrize("width", [1, 16, 250, 1024])
def test_a_norm_is_torchs(numbers, width: int, norm: Norm, dtype: torch.dtype) -> None:
    x, weight = 3 * numbers(1, 5, width, dtype=dtype), numbers(width, dtype=dtype, seed=1)
    for factor in (weight, None):
        found = normalise(x, factor, *norm)
        wide = own_norm(x.double(), None if factor is None else factor.double(), norm)
        # The scale is summed in another order; normed, weight and product each round once.
        assert_near(found, wide, ulps=2 if factor is not None and not norm.wide else 1.5)
        if dtype != torch.float32:
            assert share_equal(found, own_norm(x, factor, norm)) > 0.99


@dtypes
def test_a_norm_reads_rows_where_they_lie(numbers, dtype: torch.dtype) -> None:
    weight = numbers(16, dtype=dtype, seed=1)
    packed = numbers(1, 5, 96, dtype=dtype)
    heads = packed[..., 16:80].view(1, 5, 4, 16)
    for x in (packed[..., :16], heads, heads.transpose(1, 2), packed[..., ::6]):
        found = normalise(x, weight, 1e-6)
        assert found.is_contiguous() and torch.equal(found, normalise(x.contiguous(), weight, 1e-6))


@dtypes
def test_a_sum_and_its_norm_are_torchs(numbers, dtype: torch.dtype) -> None:
    x, residual = numbers(1, 5, 96, dtype=dtype), numbers(1, 5, 96, dtype=dtype, seed=1)
    weight = numbers(96, dtype=dtype, seed=2)
    total, found = add_normalise(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(found, normalise(total, weight, 1e-5))


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 17, 1100])
def test_a_gate_is_torchs(numbers, width: int, activation: str, dtype: torch.dtype) -> None:
    both = 4 * numbers(1, 3, 2 * width, dtype=dtype)
    x, factor = both[..., :width], both[..., width:]
    found = gate(x, factor, activation)
    assert found.is_contiguous() and found.dtype == dtype
    opened = OPENED[activation](x.double())
    # Far below zero gelu is a difference of near numbers, which float32 rounds.
    error = (found.double() - opened * factor.double()).abs()
    allowed = 4 * HALF_ULP[dtype] * (opened * factor.double()).abs() + 2e-6 * factor.abs()
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert (error <= allowed + smallest).all()
    if dtype == torch.bfloat16 and activation != "gelu_tanh":
        assert share_equal(found, OPENED[activation](x) * factor) > 0.99
    assert torch.equal(gate(x.contiguous(), factor.contiguous(), activation), found)


@dtypes
def test_large_numbers_open_and_close_a_gate(device, dtype: torch.dtype) -> None:
    x = torch.tensor([[[-1e4, -200.0, -0.0, 200.0, 1e4, float("inf")]]], dtype=dtype, device=device)
    for activation in ACTIVATIONS:
        found = gate(x[..., :5], torch.ones_like(x[..., :5]), activation)[0, 0]
        assert found[:3].abs().max() == 0 and torch.equal(found[3:], x[0, 0, 3:5])
    assert gate(x[..., 5:], torch.ones_like(x[..., 5:]), "silu").isinf().all()


@dtypes
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 1, 2), (4, 1, 64), (3, 5, 6), (2, 9, 32)])
def test_a_rotation_is_torchs(numbers, heads: int, tokens: int, dim: int, dtype) -> None:
    x = numbers(1, tokens, heads, dim + 4, dtype=dtype).transpose(1, 2)[..., :dim]
    cosine, sine = (numbers(1, 1, tokens, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    found, expected = rotate(x, cosine, sine), own_rotation(x, cosine, sine)
    if dtype == torch.float32:  # a device may multiply and add in one rounding
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    else:
        assert torch.equal(found, expected)
    assert torch.equal(rotate(x.mT.contiguous().mT, cosine, sine), found)


@pytest.mark.parametrize(
    "norm, dtype",
    [(None, torch.bfloat16), (Norm(1e-6), torch.float32), (Norm(1e-6, 1.0, True), torch.float16)],
    ids=str,
)
def test_one_launch_rotates_and_writes(numbers, device, norm: Norm | None, dtype) -> None:
    tokens, dim, value_dim = 5, 12, 7
    packed = numbers(1, tokens, 6 * dim + 2 * value_dim, dtype=dtype)
    parts = packed.split([4 * dim, 2 * dim, 2 * value_dim], -1)
    query, key, value = (
        part.view(1, tokens, heads, -1).transpose(1, 2)
        for part, heads in zip(parts, (4, 2, 2), strict=True)
    )
    weights = [numbers(dim, dtype=dtype, seed=seed) for seed in (3, 4)]
    cosine, sine = (numbers(1, 1, tokens, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    slots = torch.tensor([7, 0, 3, 9, 4], device=device)
    keys, values = (torch.full((11, 2, size), 2.0, device=device, dtype=dtype) for size in (dim, value_dim))  # fmt: skip
    norms = None if norm is None else HeadNorms(*weights, *norm)
    found = rotate_and_write(
        query, WrittenKeys(key, value, keys, values, slots), cosine, sine, norms
    )
    if norm is not None:
        query, key = (normalise(x, w, *norm) for x, w in zip((query, key), weights, strict=True))
    close = {"rtol": 4 * HALF_ULP[dtype], "atol": 4 * HALF_ULP[dtype]}
    exact = {"rtol": 0, "atol": 0} if norm is None else close
    torch.testing.assert_close(found, rotate(query, cosine, sine), **exact)
    expected = rotate(key, cosine, sine)[0].transpose(0, 1)
    torch.testing.assert_close(keys[slots], expected, **exact)
    assert torch.equal(values[slots], value[0].transpose(0, 1))
    others = [slot for slot in range(11) if slot not in slots.tolist()]
    assert (keys[others] == 2.0).all() and (values[others] == 2.0).all()


def test_a_pool_of_another_type_is_written(numbers, device) -> None:
    states = numbers(1, 2, 3, 8, dtype=torch.float32)
    angles = numbers(1, 1, 3, 8, dtype=torch.float32, seed=1)
    keys, values = (torch.zeros(4, 2, 8, device=device, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.tensor([1, 2, 3], device=device)
    rotate_and_write(states, WrittenKeys(states, states, keys, values, slots), angles, angles, None)
    expected = rotate(states, angles, angles)[0].transpose(0, 1)
    assert torch.equal(keys[slots], expected.to(torch.bfloat16))
    assert torch.equal(values[slots], states[0].transpose(0, 1).to(torch.bfloat16))


def test_no_tokens_are_no_launch(numbers) -> None:
    empty = numbers(1, 0, 8, dtype=torch.float32)
    heads = empty.view(1, 0, 2, 4).transpose(1, 2)
    assert normalise(empty, None, 1e-6).shape == gate(empty, empty, "silu").shape == (1, 0, 8)
    assert rotate(heads, heads[:, :1], heads[:, :1]).shape == (1, 2, 0, 4)


@dtypes
def test_a_row_depends_on_no_other(numbers, dtype: torch.dtype) -> None:
    x = numbers(1, 4, 99, dtype=dtype)
    x[0, 2, 5] = float("nan")
    normed, gated = normalise(x, None, 1e-6), gate(x, x, "silu")
    for row in range(4):
        alone = x[:, row : row + 1].clone()
        for whole, found in ((normed, normalise(alone, None, 1e-6)), (gated, gate(alone, alone, "silu"))):  # fmt: skip
            torch.testing.assert_close(found[0, 0], whole[0, row], rtol=0, atol=0, equal_nan=True)
    assert normed[0, 2].isnan().all() and gated[0, 2].isnan().sum() == 1
    assert not normed[0, 1].isnan().any()
