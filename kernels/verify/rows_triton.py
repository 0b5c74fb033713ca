"""Rows of processed logits as distributions inside Triton kernels, without a buffer of their size:
what verification is made of.

`row_stats` keeps the maximum and the sum of exponentials of every block of a row. The row's
normaliser is a pair, its maximum and the log of the sum relative to it: one float32 for both would
round the small one away where logits are large, which low temperatures make them. A race over a
distribution leaves the winner of every block, and `emit` finds the winner of these and writes the
output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device
from draftsmith.kernels.sampling.filters_triton import MINUS_INF, clean, is_kept, tempered

# Positions of a request that kernels are compiled for at least: one variant for every k up to 7,
# and for what the end of an answer leaves of it.
FEWEST_DEPTHS = 8


@triton.jit(do_not_specialize=["per_request"], do_not_specialize_on_alignment=["lengths"])
def row_stats(
    logits,  # [N, V]
    stride,  # of a row of logits
    lengths,  # [N // per_request] int64
    per_request,  # scalar
    num_tokens,  # V
    maxima,  # [N, blocks] float32, written
    sums,  # [N, blocks] float32, written
    num_blocks,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, block). `GROUPED` rows come `per_request` at a time, and only the first
    `lengths` of a group count."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    # Nested, so that the load is not even compiled for rows without groups.
    if GROUPED:  # noqa: SIM102
        if row % per_request >= tl.load(lengths + row // per_request):
            return
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = clean(tl.load(logits + row * stride + columns, mask=columns < num_tokens, other=MINUS_INF))
    top = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - finite(top)), axis=0)
    tl.store(maxima + row * num_blocks + block, top)
    tl.store(sums + row * num_blocks + block, total)


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
def normaliser(maxima, sums, row, num_blocks, BLOCKS: tl.constexpr):
    """(maximum, log of the sum relative to it) of a row from its blocks; (-inf, 0) for a row
    without mass."""
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    tops = tl.load(maxima + row * num_blocks + blocks, mask=inside, other=MINUS_INF)
    totals = tl.load(sums + row * num_blocks + blocks, mask=inside, other=0.0)
    return log_total(tops, totals)


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


@triton.jit
def keep_best(
    distribution,  # [BLOCK] logits
    noise,  # [BLOCK] log noise
    scores,  # [B, blocks, 2] float64, written
    winners,  # [B, blocks, 2] int32, written
    b,  # scalar
    block,  # scalar
    num_blocks,
    slot: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of a block in the race of row b. Slot 0 is the distribution to draw from, slot
    1 the one to fall back to.

    Scores are float64 and formed below the block's maximum, so that large logits do not round the
    noise away.
    """
    top = finite(tl.max(distribution, axis=0))
    best, at = tl.max((distribution - top) - noise, axis=0, return_indices=True)
    place = (b * num_blocks + block) * 2 + slot
    tl.store(scores + place, best.to(tl.float64) + top.to(tl.float64))
    tl.store(winners + place, block * BLOCK + at)


@triton.jit
def winner(scores, winners, b, slot, num_blocks, BLOCKS: tl.constexpr):
    """The best block's token; -1 when every score is -inf."""
    blocks = tl.arange(0, BLOCKS)
    values = tl.load(
        scores + (b * num_blocks + blocks) * 2 + slot, mask=blocks < num_blocks, other=MINUS_INF
    )
    best, at = tl.max(values, axis=0, return_indices=True)
    token = tl.load(winners + (b * num_blocks + at) * 2 + slot)
    return tl.where(best == MINUS_INF, -1, token)


@triton.jit(do_not_specialize=["num_draft"], do_not_specialize_on_alignment=["draft_tokens"])
def emit(
    draft_tokens,  # [B, K] int64
    accepted,  # [B] int64
    scores,  # [B, blocks, 2] float64
    winners,  # [B, blocks, 2] int32
    tokens,  # [B, K + 1] int64, written
    num_draft,  # K
    num_blocks,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program b writes row b of the output: kept drafts, the winner, -1."""
    b = tl.program_id(0).to(tl.int64)
    kept = tl.load(accepted + b)
    token = winner(scores, winners, b, 0, num_blocks, BLOCKS)
    token = tl.where(token < 0, winner(scores, winners, b, 1, num_blocks, BLOCKS), token)
    columns = tl.arange(0, COLUMNS)
    drafts = tl.load(draft_tokens + b * num_draft + columns, mask=columns < kept, other=-1)
    output = tl.where(columns == kept, token.to(tl.int64), drafts)
    tl.store(tokens + b * (num_draft + 1) + columns, output, mask=columns <= num_draft)


def contiguous_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


@on_its_device
def block_stats(
    rows: torch.Tensor, lengths: torch.Tensor, per_request: int, block: int, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    maxima, sums = (
        torch.empty(len(rows), num_blocks, dtype=torch.float32, device=rows.device)
        for _ in range(2)
    )
    if len(rows):
        row_stats[(len(rows), num_blocks)](
            rows,
            rows.stride(0),
            lengths,
            per_request,
            rows.shape[-1],
            maxima,
            sums,
            num_blocks,
            GROUPED=per_request > 0,
            BLOCK=block,
        )
    return maxima, sums
