"""The streams of `randomness.py` inside Triton kernels: the same 64 bits, the same uniforms."""

from __future__ import annotations

import triton
import triton.language as tl

from draftsmith.kernels.sampling import random_streams as randomness

# int() because a constexpr of an IntEnum member would carry the enum into the compiler.
DRAFT = tl.constexpr(int(randomness.Purpose.DRAFT))
ACCEPT = tl.constexpr(int(randomness.Purpose.ACCEPT))
RESIDUAL = tl.constexpr(int(randomness.Purpose.RESIDUAL))
BONUS = tl.constexpr(int(randomness.Purpose.BONUS))
_NUM_PURPOSES = tl.constexpr(randomness.NUM_PURPOSES)
_GOLDEN = tl.constexpr(randomness.GOLDEN)
_MIX_1 = tl.constexpr(randomness.MIX_1)
_MIX_2 = tl.constexpr(randomness.MIX_2)
_UNIT = tl.constexpr(randomness.UNIT)
_BELOW_ONE = tl.constexpr(1 - 2.0**-24)


@triton.jit
def _logical_shift(x, bits: tl.constexpr):
    return (x.to(tl.uint64, bitcast=True) >> bits).to(tl.int64, bitcast=True)


@triton.jit
def mix(x):
    """SplitMix64's finaliser of int64."""
    x = (x ^ _logical_shift(x, 30)) * _MIX_1
    x = (x ^ _logical_shift(x, 27)) * _MIX_2
    return x ^ _logical_shift(x, 31)


@triton.jit
def stream_key(seed, position, purpose):
    counter = position * _NUM_PURPOSES + purpose
    return mix(mix(seed + _GOLDEN) + counter * _GOLDEN)


@triton.jit
def uniform(key, number):
    """float64 strictly inside (0, 1); equal to `randomness.uniform` bit for bit."""
    bits = mix(key + number * _GOLDEN)
    return (_logical_shift(bits, 12).to(tl.float64) + 0.5) * _UNIT


@triton.jit
def noise_uniform(key, tokens):
    """float32 uniform of each token, which its noise comes from; below 1."""
    bits = mix(key + (tokens + 1).to(tl.int64) * _GOLDEN)
    return tl.minimum((_logical_shift(bits, 12).to(tl.float32) + 0.5) * _UNIT, _BELOW_ONE)


@triton.jit
def log_exponential(u):
    """log E of uniforms u, E = -log1p(-u)."""
    # A series where 1 - u would round u away, Kahan's correction of that rounding elsewhere.
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    rest = 1.0 - u
    exact = -tl.log(rest) * (u / tl.where(rest < 1.0, 1.0 - rest, 1.0))
    return tl.log(tl.where(u < 0.015625, series, exact))


@triton.jit
def log_noise(key, tokens):
    """log E of each token, E ~ Exp(1), float32; `randomness.token_noise` up to the rounding of the
    logarithms."""
    return log_exponential(noise_uniform(key, tokens))
