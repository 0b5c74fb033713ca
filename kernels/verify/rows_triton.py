"""Rows of logits as distributions inside Triton kernels, without a buffer of their size: what
verification is made of.

`row_stats` keeps the maximum and the sum of exponentials of every block of a row. The row's
normaliser is a pair, its maximum and the log of the sum relative to it: one float32 for both would
round the small one away where logits are large, which low temperatures make them.

Legend: B requests, K draft positions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device, side_by_side
from draftsmith.kernels.sampling.filters_triton import MINUS_INF, clean, is_kept, tempered
from draftsmith.kernels.verify.verdict import Drafts

# Positions of a request that kernels are compiled for at least: one variant for every k up to 7,
# and for what the end of an answer leaves of it.
FEWEST_DEPTHS = 8
# Requests whose rows each program adds up by itself: the most, and the fewest that it is compiled
# for.
MOST_SUMMED = 1024
_FEWEST_REQUESTS = 64
# Numbers that a race reads of its request.
NUM_CHOICES, NUM_SCALES = tl.constexpr(6), tl.constexpr(8)


@triton.jit
def target_logits(
    logits,  # [R, V] raw
    stride,  # of a row of logits
    cuts,  # [R, 2] int32, those of `filter_cuts`; or None
    rows,  # scalar or as `ids`
    ids,
    inside,  # where `ids` are tokens
    temperature,  # scalar
):
    """Processed logits at `ids`; -inf outside."""
    x = tl.load(logits + rows * stride + ids, mask=inside, other=MINUS_INF)
    x = tempered(x, temperature)
    if cuts is not None:
        cut, first_id = tl.load(cuts + 2 * rows), tl.load(cuts + 2 * rows + 1)
        x = tl.where(is_kept(x, ids, cut, first_id), x, MINUS_INF)
    return x


@triton.jit
def temperature_of(temperatures, b):
    """1 where none are given."""
    if temperatures is None:
        temperature = 1.0
    else:
        temperature = tl.load(temperatures + b)
    return temperature


@triton.jit
def first_row(owned, b, num_drafting, REQUESTS: tl.constexpr):
    """First row of logits of request b."""
    if REQUESTS == 0:
        first = tl.load(owned + b)
    else:
        before = tl.arange(0, REQUESTS)
        rows = tl.load(owned + before, mask=(before < b) & (before < num_drafting), other=0)
        first = tl.sum(rows, axis=0) + b
    return first


# What differs from round to round makes no variants of its own.
@triton.jit(
    do_not_specialize=["num_drafting", "num_draft"],
    do_not_specialize_on_alignment=["temperatures", "cuts", "lengths", "owned"],
)
def row_stats(
    logits,  # [R, V]
    stride,  # of a row of logits
    temperatures,  # [B] float32, 0 is greedy; or None
    cuts,  # as `target_logits` takes them
    q_logits,  # [D * K, V] processed
    q_stride,  # of a row of q_logits
    lengths,  # [D] int64
    owned,  # [D] int64: rows of logits beside the first one; with REQUESTS 0 [B]: first rows
    maxima,  # [2 (p, q), B, K + 1, blocks] float32, written
    sums,  # [2, B, K + 1, blocks] float32, written: of exponentials below the maximum
    places,  # [B, K + 1, blocks] int32, written where greedy: tokens of the maxima
    num_drafting,  # D
    num_draft,  # K
    num_tokens,  # V
    num_blocks,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Program (b * (K + 1) + depth, block, of q)."""
    place, block, of_q = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, depth = place // (num_draft + 1), place % (num_draft + 1)
    length = tl.load(lengths + b, mask=b < num_drafting, other=0)
    if depth + of_q > length:
        return
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    temperature = temperature_of(temperatures, b)
    if of_q:
        row = b.to(tl.int64) * num_draft + depth
        x = clean(tl.load(q_logits + row * q_stride + columns, mask=inside, other=MINUS_INF))
    else:
        row = first_row(owned, b, num_drafting, REQUESTS) + depth
        x = target_logits(logits, stride, cuts, row, columns, inside, temperature)
    top = tl.max(x, axis=0)
    part = (of_q * tl.num_programs(0) + place).to(tl.int64) * num_blocks + block
    tl.store(maxima + part, top)
    tl.store(sums + part, tl.sum(tl.exp(x - finite(top)), axis=0))
    if (temperature == 0) & (of_q == 0):
        tl.store(places + part, tl.min(tl.where(x == top, columns, 0x7FFFFFFF), axis=0))


@triton.jit
def normalisers(maxima, sums, rows, valid, num_blocks, BLOCKS: tl.constexpr):
    """(maximum, log of the sum relative to it, its first block) of `rows` [DEPTHS]; (-inf, 0) for
    a row without mass."""
    blocks = tl.arange(0, BLOCKS)
    at = rows[:, None] * num_blocks + blocks[None, :]
    inside = valid[:, None] & (blocks < num_blocks)[None, :]
    tops = tl.load(maxima + at, mask=inside, other=MINUS_INF)
    totals = tl.load(sums + at, mask=inside, other=0.0)
    top, block = tl.max(tops, axis=1, return_indices=True)
    total = tl.sum(totals * tl.exp(tops - finite(top)[:, None]), axis=1)
    return top, tl.log(tl.where(total > 0, total, 1.0)), block


@triton.jit
def at_depth(values, depths, depth):
    """The one of `values` [DEPTHS] at `depth`."""
    return tl.max(tl.where(depths == depth, values, float("-inf")), axis=0)


@triton.jit
def log_total(tops, totals):
    """(maximum, log of the sum relative to it) of lanes that hold such a maximum and a sum; (-inf,
    0) without mass."""
    top = tl.max(tops, axis=0)
    total = tl.sum(totals * tl.exp(tops - finite(top)), axis=0)
    return top, tl.log(tl.where(total > 0, total, 1.0))


@triton.jit
def finite(top):
    """-inf minus -inf is no number: what to subtract in place of a maximum of -inf."""
    return tl.where(top == MINUS_INF, 0.0, top)


@triton.jit
def logprob(x, top, log_sum):
    """A distribution without mass gives -inf everywhere."""
    return tl.where(top == MINUS_INF, MINUS_INF, (x - finite(top)) - log_sum)


@triton.jit
def log_residual(log_p, log_q):
    """log max(p - q, 0) elementwise: log p + log(1 - exp(log q - log p))."""
    gap = tl.where(log_q == MINUS_INF, MINUS_INF, log_q - finite(log_p))
    small = -gap * (1.0 + gap * (0.5 + gap * (0.16666667 + gap * 0.041666668)))
    rest = tl.where(gap > -0.03125, small, 1.0 - tl.exp(tl.minimum(gap, 0.0)))
    positive = (gap < 0.0) & (log_p > MINUS_INF)
    return tl.where(positive, log_p + tl.log(tl.where(positive, rest, 1.0)), MINUS_INF)


class VerifyRows(NamedTuple):
    """Distributions of a round, and room for what kernels write of them."""

    logits: torch.Tensor  # [R, V]
    temperatures: torch.Tensor | None  # [B] float32, None for processed logits
    cuts: torch.Tensor | None
    q_logits: torch.Tensor  # [D * K, V]; p, which nothing reads, where there are none
    has_q: bool
    tokens: torch.Tensor  # [D, K]
    lengths: torch.Tensor  # [D]
    owned: torch.Tensor
    num_requests: int
    summed: int  # REQUESTS of `first_row`
    block: int
    num_blocks: int
    stats: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # maxima, sums, places
    choices: torch.Tensor
    scales: torch.Tensor
    raced: torch.Tensor
    verdicts: torch.Tensor  # [B, K + 2] int64

    @property
    def distributions(self) -> tuple[torch.Tensor | int | None, ...]:
        """First arguments of the kernels."""
        p, q = self.logits, self.q_logits
        return p, p.stride(0), self.temperatures, self.cuts, q, q.stride(0)

    @property
    def decision(self) -> tuple[torch.Tensor, ...]:
        return self.choices, self.scales, self.raced, self.verdicts

    @property
    def paddings(self) -> dict[str, int]:
        depths = max(FEWEST_DEPTHS, triton.next_power_of_2(self.tokens.shape[1] + 1))
        blocks = triton.next_power_of_2(self.num_blocks)
        return {"BLOCKS": blocks, "DEPTHS": depths}


def rows_of(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    cuts: torch.Tensor | None,
    drafts: Drafts,
    num_requests: int,
    block: int,
) -> VerifyRows:
    """Distributions for kernels of `block` tokens of the vocabulary per program."""
    num_drafting, num_draft = drafts.tokens.shape
    num_tokens = logits.shape[-1]
    block = min(block, triton.next_power_of_2(num_tokens))
    num_blocks = triton.cdiv(num_tokens, block)
    tokens, lengths, owned = (
        tensor.contiguous() for tensor in (drafts.tokens, drafts.lengths, drafts.sizes)
    )
    summed = max(_FEWEST_REQUESTS, triton.next_power_of_2(num_requests))
    if num_requests > MOST_SUMMED:
        summed = 0
        counts = torch.nn.functional.pad(owned, (0, num_requests - num_drafting)) + 1
        owned = counts.cumsum(0) - counts
    logits = side_by_side(logits)
    has_q = drafts.logits is not None and num_draft > 0
    q_logits = logits
    if drafts.logits is not None and num_draft > 0:
        q_logits = side_by_side(drafts.logits.flatten(0, 1))

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    measures = num_requests, num_draft + 1, num_blocks
    return VerifyRows(
        logits,
        None if temperatures is None else temperatures.contiguous(),
        cuts,
        q_logits,
        has_q,
        tokens,
        lengths,
        owned,
        num_requests,
        summed,
        block,
        num_blocks,
        (
            empty(2, *measures, dtype=torch.float32),
            empty(2, *measures, dtype=torch.float32),
            empty(*measures, dtype=torch.int32),
        ),
        empty(num_requests, NUM_CHOICES.value, dtype=torch.int64),
        empty(num_requests, NUM_SCALES.value, dtype=torch.float32),
        empty(num_requests, dtype=torch.int32),
        empty(num_requests, num_draft + 2, dtype=torch.int64),
    )


@on_its_device
def measure_rows(rows: VerifyRows) -> None:
    num_drafting, num_draft = rows.tokens.shape
    programs = rows.num_requests * (num_draft + 1), rows.num_blocks, 1 + rows.has_q
    row_stats[programs](
        *rows.distributions,
        rows.lengths,
        rows.owned,
        *rows.stats,
        num_drafting,
        num_draft,
        rows.logits.shape[-1],
        rows.num_blocks,
        BLOCK=rows.block,
        REQUESTS=rows.summed,
        num_warps=4 if rows.cuts is None else 8,
    )
