"""Steps between products against plain torch, of any layout, and each row's own."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.host_compiler import DTYPES
from draftsmith.kernels.products.row_steps import RowSteps, row_steps

pytestmark = pytest.mark.skipif(row_steps(torch.float32) is None, reason="there is no C++ compiler")
CLOSE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 0.008, "atol": 1e-6}}
dtypes = pytest.mark.parametrize("dtype", list(DTYPES))


def steps(dtype: torch.dtype) -> RowSteps:
    found = row_steps(dtype)
    assert found is not None
    return found


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dtypes
@pytest.mark.parametrize("width", [1, 15, 16, 64, 250])
def test_a_norm_is_torchs(width: int, dtype: torch.dtype) -> None:
    x, weight = numbers(1, 5, width, dtype=dtype) * 3, numbers(width, dtype=dtype, seed=1)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    found = steps(dtype).normalise(x, weight, 1e-5)
    assert found.dtype == dtype and found.shape == x.shape
    torch.testing.assert_close(found, weight * normed.to(dtype), **CLOSE[dtype])
    plain = steps(dtype).normalise(x, None, 1e-5)
    torch.testing.assert_close(plain, normed.to(dtype), **CLOSE[dtype])
    shifted = steps(dtype).normalise(x, weight, 1e-5, 1.0, True)
    exact = (normed * (weight.float() + 1)).to(dtype)
    torch.testing.assert_close(shifted, exact, **CLOSE[dtype])
    apart = steps(dtype).normalise(x[:, ::2], weight, 1e-5)
    assert torch.equal(apart, found[:, ::2])


@dtypes
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 1, 2), (4, 1, 64), (3, 5, 6), (2, 9, 32)])
def test_a_rotation_is_torchs(heads: int, tokens: int, dim: int, dtype: torch.dtype) -> None:
    x = numbers(1, tokens, heads, dim + 4, dtype=dtype).transpose(1, 2)[..., :dim]
    cosine, sine = (numbers(1, 1, tokens, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
    expected = torch.addcmul(x * cosine, turned, sine)
    found = steps(dtype).rotate(x, cosine, sine)
    assert found.shape == x.shape
    torch.testing.assert_close(found, expected, **CLOSE[dtype])
    # Numbers of a head that do not lie side by side.
    torch.testing.assert_close(
        steps(dtype).rotate(x.mT.contiguous().mT, cosine, sine), found, rtol=0, atol=0
    )


@dtypes
@pytest.mark.parametrize("width", [1, 17, 512])
def test_a_gate_is_torchs(width: int, dtype: torch.dtype) -> None:
    both = numbers(1, 4, 2 * width, dtype=dtype) * 20
    x, factor = both[..., :width], both[..., width:]
    found = steps(dtype).gate(x, factor)
    expected = torch.nn.functional.silu(x) * factor
    assert found.shape == x.shape and found.is_contiguous()
    torch.testing.assert_close(found, expected, **CLOSE[dtype])
    apart = steps(dtype).gate(x.mT.contiguous().mT, factor.contiguous())
    assert torch.equal(apart, found)


def test_a_gate_has_torchs_bits_of_every_bfloat16() -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)[None, None]
    found, expected = steps(torch.bfloat16).gate(x, torch.ones_like(x)), torch.nn.functional.silu(x)
    assert torch.equal(found.isnan(), expected.isnan())
    # Where e^x is hardly a number any more, both are nearly nothing.
    tiny = (x < -87) & (x > -89)
    assert (found == expected)[~tiny & ~expected.isnan()].all()
    assert (found - expected)[tiny].abs().max() < 1e-36


@dtypes
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    x, weight = numbers(1, 50, 64, dtype=dtype), numbers(64, dtype=dtype, seed=1)
    cosine, heads = numbers(1, 1, 50, 64, dtype=dtype, seed=2), x.view(1, 1, 50, 64)
    found, before, seen = steps(dtype), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            normed = found.normalise(x, weight, 1e-5)
            seen.append((normed, found.rotate(heads, cosine, cosine), found.gate(x, normed)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*seen))


def test_no_other_dtype_has_steps() -> None:
    assert row_steps(torch.float16) is None and row_steps(torch.float64) is None
