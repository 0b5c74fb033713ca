"""Counter-based random streams: every draw is a pure function of (request seed, absolute position,
purpose, number).

The hash is SplitMix64's finaliser over int64, so CPU, CUDA and Triton give the same bits, and a
request draws the same numbers in any batch row, after preemption and with any chunking.

The number separates the draws of one stream: a race over the vocabulary takes token id + 1. No
race is run on the ACCEPT stream, whose numbers count tests instead: the siblings of a tree (0 for
the first, which is a chain's only one), the drafted tokens of a block. Key plus number times
`GOLDEN`, finalised, is the published SplitMix64 sequence started at the key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from draftsmith.kernels.dispatch import operation, reads_freely
from draftsmith.kernels.host_compiler import function_of

WORD = (1 << 64) - 1


def signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number: torch holds no others."""
    return word - (1 << 64) if word >> 63 else word


# SplitMix64's odd constants.
GOLDEN = signed(0x9E3779B97F4A7C15)
MIX_1 = signed(0xBF58476D1CE4E5B9)
MIX_2 = signed(0x94D049BB133111EB)
UNIT = 2.0**-52
# A batch of at most so many rows on the CPU is hashed in Python's own numbers: thirty small tensor
# operations cost more.
FEW = 32
# Logits of so many numbers are given noise wherever they have mass or not: to look costs more.
SMALL = 1 << 14


class Purpose(IntEnum):
    """Decision that a draw serves. One stream for two purposes would bias the output: an accept
    draw would depend on the draft draw."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3
    ROUND = 4  # seeds of single rounds, see `round_seeds`


NUM_PURPOSES = 8  # room for more purposes without changing the streams of these


def stream_keys(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose | torch.Tensor
) -> torch.Tensor:
    """The 64-bit key of each row's stream; seeds, positions and purposes are int64 and broadcast
    together."""
    if reads_freely(seeds.device) and max(seeds.numel(), positions.numel()) <= FEW:
        return _few_keys(seeds, positions, torch.as_tensor(purpose))
    counters = positions * NUM_PURPOSES + purpose
    return _mix_(_mix_(seeds + GOLDEN) + counters * GOLDEN)


def _few_keys(seeds: torch.Tensor, positions: torch.Tensor, purposes: torch.Tensor) -> torch.Tensor:
    rows = torch.broadcast_tensors(seeds, positions, purposes)
    numbers = zip(*(tensor.flatten().tolist() for tensor in rows))
    keys = [_few_key(*row) for row in numbers]
    return torch.tensor(keys, dtype=torch.int64).view(rows[0].shape)


def _few_key(seed: int, position: int, purpose: int) -> int:
    return signed(_mix(_of_seed(seed) + (position * NUM_PURPOSES + purpose) * GOLDEN))


@lru_cache(maxsize=1024)
def _of_seed(seed: int) -> int:
    return _mix(seed + GOLDEN)


def uniform(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    """One draw for each seed, position and number (int64, broadcast together) -> float64, strictly
    inside (0, 1).

    Without `numbers` each is 0.
    """
    keys = stream_keys(seeds, positions, purpose)
    if numbers is not None:
        keys = keys + numbers * GOLDEN
    if reads_freely(keys.device) and keys.numel() <= FEW:
        draws = [((_mix(key) >> 12) + 0.5) * UNIT for key in keys.flatten().tolist()]
        return torch.tensor(draws, dtype=torch.float64).view(keys.shape)
    return _unit_interval(_mix_(keys), torch.float64)


def round_seeds(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Seeds [B] int64 to draft one round with, whose first drafted token is at `positions` [B].

    The next round drafts the positions again that this one rejects, and must not draw the same
    noise there, whatever the rule of verification: what was rejected has been looked at. A block
    looks at its last draft before it decides on its first one. Behind a chain or a tree it is
    choices between rounds that look: a draft that failed behind a token rests, another one drafts
    in its place, k or the least survival follows how much was drafted. With the request's own seed
    such a choice would depend on the very draw that it lets happen or not, which biases the output
    (tests/integration/test_fresh_noise.py).

    A position at which a round began to draft is decided before another round drafts, so that
    rounds start at different positions and these seeds differ from round to round.
    """
    return stream_keys(seeds, positions, Purpose.ROUND)


def few_round_seeds(streams: Sequence[tuple[int, int]]) -> list[int]:
    """`round_seeds` of (seed, position) pairs, on the host."""
    return [_few_key(seed, position, int(Purpose.ROUND)) for seed, position in streams]


class Draws(Protocol):
    """Source of verification's random numbers. Serving uses `STREAMS`; an enumeration chooses its
    own."""

    def uniform(
        self, seeds: torch.Tensor, positions: torch.Tensor, numbers: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The draw of each acceptance test, in (0, 1); arguments and shape as `uniform`'s."""
        ...

    def token(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        purposes: torch.Tensor,
    ) -> torch.Tensor:
        """One token [N] int64 a row of logits [N, V]; -1 for an all -inf row."""
        ...


class Streams:
    """The request's own streams."""

    def uniform(
        self, seeds: torch.Tensor, positions: torch.Tensor, numbers: torch.Tensor | None = None
    ) -> torch.Tensor:
        return uniform(seeds, positions, Purpose.ACCEPT, numbers)

    def token(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        purposes: torch.Tensor,
    ) -> torch.Tensor:
        return race(logits, stream_keys(seeds, positions, purposes))


STREAMS = Streams()


def sample(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose
) -> torch.Tensor:
    """Draws one token per row from processed logits [N, V] -> ids [N] int64. A token at -inf is
    never drawn.

    An all -inf row is no distribution and gives -1.
    """
    return race(logits, stream_keys(seeds, positions, purpose))


def race(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The exponential race: token v arrives at time E_v / exp(logit_v), E_v ~ Exp(1); the first one
    wins. Computed in logs."""
    best, ids = _scores(logits, keys).max(dim=-1)
    return torch.where(best == -math.inf, -1, ids)


def sample_without_replacement(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, purpose: Purpose, count: int
) -> torch.Tensor:
    """Draws `count` different tokens per row from processed logits [N, V], one after the other ->
    ids [N, count] int64.

    They are the first arrivals of the race that `sample` runs, so the first one is `sample`'s:
    given the arrivals before, the next arrival follows the distribution renormalised over the
    others. -1 once the tokens with mass are used up.
    """
    return first_arrivals(_scores(logits, stream_keys(seeds, positions, purpose)), count)


def first_arrivals(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` first tokens of races by minus the logs of their times [N, V] -> ids [N, count]
    int64, -1 for those that never come."""
    drawn = torch.topk(scores, min(count, scores.shape[-1]), dim=-1)
    ids = torch.where(drawn.values == -math.inf, -1, drawn.indices)
    return torch.nn.functional.pad(ids, (0, count - ids.shape[1]), value=-1)


def _scores(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Minus the log of every token's time of arrival [N, V]; -inf for a token that never comes."""
    scores = None
    if reads_freely(logits.device) and logits.numel() > SMALL:
        scores = _sparse_scores(logits, keys)
    return logits - _every_noise(logits, keys) if scores is None else scores


def _every_noise(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`token_noise` of all tokens of logits [N, V]."""
    return _log_exponential_(uniforms(keys, logits.shape[-1], logits.dtype))


@operation
def uniforms(keys: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Draws of each key [N], int64, and token, in (0, 1) -> [N, V]."""
    return _unit_interval(_mix_(keys[:, None] + _token_offsets(num_tokens, keys.device)), dtype)


def _sparse_scores(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
    """The same scores, with noise made only for tokens that have mass; None when most have. Greedy
    and filtered distributions have few."""
    possible = logits > -math.inf
    if int(possible.sum()) * 4 > logits.numel():
        return None
    rows, ids = possible.nonzero(as_tuple=True)
    noise = token_noise(
        keys[rows], _token_offsets(logits.shape[-1], logits.device)[ids], logits.dtype
    )
    scores = torch.full_like(logits, -math.inf)
    scores[rows, ids] = logits[rows, ids] - noise
    return scores


def token_noise(keys: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """log E with E ~ Exp(1), for keys and token offsets that broadcast together."""
    return _log_exponential_(_unit_interval(_mix_(keys + offsets), dtype))


def _log_exponential_(uniforms: torch.Tensor) -> torch.Tensor:
    # The winner has a small E. E = -log1p(-u) keeps all the relative precision of a small u;
    # -log(u) would lose it near u = 1.
    return uniforms.neg_().log1p_().neg_().log_()


@lru_cache(maxsize=16)
def _token_offsets(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Summand of each token in a row's key; 0 belongs to `uniform`."""
    return torch.arange(1, num_tokens + 1, device=device) * GOLDEN


def _unit_interval(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The top 52 bits as (n + 1/2) / 2^52; in float32 the values that would round to 1 stop just
    below it."""
    values = ((bits >> 12) & ((1 << 52) - 1)).to(dtype)
    values.add_(0.5).mul_(UNIT)
    return values if dtype == torch.float64 else values.clamp_(max=1 - 2.0**-24)


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, in place on a fresh tensor. Masks make torch's arithmetic shift a
    logical one."""
    x ^= (x >> 30) & ((1 << 34) - 1)
    x *= MIX_1
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= MIX_2
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def _mix(x: int) -> int:
    """The same finaliser on one number; the bits come back unsigned."""
    x &= WORD
    x = (x ^ (x >> 30)) * MIX_1 & WORD
    x = (x ^ (x >> 27)) * MIX_2 & WORD
    return x ^ (x >> 31)


SOURCE = Path(__file__).with_name("draw_cpu.cpp")


def _kernel() -> Any:
    return function_of(SOURCE, "uniforms_float32", "ppnn")


def uniforms_compiled(
    keys: torch.Tensor, num_tokens: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """The bits of `uniforms`, in one operation in place of seventeen; None for another type than
    float32, and where there is no compiler."""
    kernel = _kernel() if dtype == torch.float32 else None
    if kernel is None:
        return None
    keys = keys.contiguous()
    out = torch.empty((len(keys), num_tokens), dtype=dtype)
    kernel(keys.data_ptr(), out.data_ptr(), len(keys), num_tokens)
    return out
