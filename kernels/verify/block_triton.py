"""Block verification in Triton: six launches that read the distributions twice, and the deciding
rows once more.

1. `row_stats`: maximum and sum of exponentials of every block of every row; together the row's
  normaliser.
2. `_reach`: one program per request: the reach r_i of its path after each draft, and after how many
  drafts the block ends.
3. `_mass`: one program per block of each draft distribution's row; its part of the mass of
  max(r_i p - q, 0).
4. `_decide`: one program per request finds the latest i at which its uniform lets the path stand.
5. `_race`: one program per block of each deciding row; log of max(r_i p - q, 0), or of p, minus log
  E.
6. `emit`: the winner of the blocks, and the row of output tokens.

What is kept is O(rows x blocks). `block.verify_block` has the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device
from draftsmith.kernels.sampling.random_streams_triton import (
    ACCEPT,
    BONUS,
    RESIDUAL,
    log_noise,
    stream_key,
    uniform,
)
from draftsmith.kernels.verify.chain_triton import verify_chain_triton
from draftsmith.kernels.verify.residual import rows_before
from draftsmith.kernels.verify.rows_triton import (
    FEWEST_DEPTHS,
    MINUS_INF,
    block_stats,
    clean,
    contiguous_rows,
    emit,
    keep_best,
    log_residual,
    logprob,
    normaliser,
)
from draftsmith.kernels.verify.verdict import Verdict

BLOCK = 4096


@triton.jit(
    do_not_specialize=["num_draft"],
    do_not_specialize_on_alignment=["draft_tokens", "lengths", "first_rows"],
)
def _reach(
    p_logits,  # [R, V]
    p_stride,  # of a row of p_logits
    p_maxima,  # [R, blocks] float32
    p_sums,  # [R, blocks] float32, of exp(p - maximum)
    q_logits,  # [B * K, V]
    q_stride,  # of a row of q_logits
    q_maxima,  # [B * K, blocks] float32
    q_sums,  # [B * K, blocks] float32
    draft_tokens,  # [B, K] int64
    lengths,  # [B] int64
    first_rows,  # [B] int64, first row of p of each request
    reaches,  # [B, K + 1] float32, written
    lasts,  # [B] int64, written
    num_draft,  # K
    num_blocks,
    BLOCKS: tl.constexpr,
):
    """Program b: log r_i for i up to the end of request b's block, and where that is."""
    b = tl.program_id(0).to(tl.int64)
    length, first = tl.load(lengths + b), tl.load(first_rows + b)
    last = tl.zeros((), tl.int64)
    reach = tl.zeros((), tl.float32)
    alive = length >= 0
    tl.store(reaches + b * (num_draft + 1), reach)
    for depth in range(num_draft):
        token = tl.load(draft_tokens + b * num_draft + depth)
        q_row = b * num_draft + depth
        drawn = alive & (depth < length) & (token >= 0)
        q = clean(tl.load(q_logits + q_row * q_stride + token, mask=drawn, other=MINUS_INF))
        alive = drawn & (q > MINUS_INF)
        if alive:
            p = clean(tl.load(p_logits + (first + depth) * p_stride + token))
            p_top, p_log_sum = normaliser(p_maxima, p_sums, first + depth, num_blocks, BLOCKS)
            q_top, q_log_sum = normaliser(q_maxima, q_sums, q_row, num_blocks, BLOCKS)
            reach = tl.minimum(
                reach + (logprob(p, p_top, p_log_sum) - logprob(q, q_top, q_log_sum)), 0.0
            )
            last += 1
        tl.store(reaches + b * (num_draft + 1) + depth + 1, reach)
    tl.store(lasts + b, last)


@triton.jit
def _left(
    p_logits,  # [R, V]
    p_stride,  # of a row of p_logits
    p_maxima,  # [R, blocks] float32
    p_sums,  # [R, blocks] float32, of exp(p - maximum)
    q_logits,  # [B * K, V]
    q_stride,  # of a row of q_logits
    q_maxima,  # [B * K, blocks] float32
    q_sums,  # [B * K, blocks] float32
    p_row,  # scalar
    q_row,  # scalar
    reach,  # scalar, log r
    columns,  # [BLOCK] token ids
    num_tokens,  # V
    num_blocks,
    BLOCKS: tl.constexpr,
):
    """log max(r p - q, 0) of some columns."""
    inside = columns < num_tokens
    p = clean(tl.load(p_logits + p_row * p_stride + columns, mask=inside, other=MINUS_INF))
    q = clean(tl.load(q_logits + q_row * q_stride + columns, mask=inside, other=MINUS_INF))
    p_top, p_log_sum = normaliser(p_maxima, p_sums, p_row, num_blocks, BLOCKS)
    q_top, q_log_sum = normaliser(q_maxima, q_sums, q_row, num_blocks, BLOCKS)
    return log_residual(logprob(p, p_top, p_log_sum) + reach, logprob(q, q_top, q_log_sum))


@triton.jit(do_not_specialize=["num_draft"], do_not_specialize_on_alignment=["first_rows"])
def _mass(
    p_logits,  # [R, V]
    p_stride,  # of a row of p_logits
    p_maxima,  # [R, blocks] float32
    p_sums,  # [R, blocks] float32, of exp(p - maximum)
    q_logits,  # [B * K, V]
    q_stride,  # of a row of q_logits
    q_maxima,  # [B * K, blocks] float32
    q_sums,  # [B * K, blocks] float32
    first_rows,  # [B] int64, first row of p of each request
    reaches,  # [B, K + 1] float32
    lasts,  # [B] int64
    masses,  # [B, K, blocks] float32, written
    num_draft,  # K
    num_tokens,  # V
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (b * K + i, block). A path without any draft needs no test, so that i = 0 is left
    out."""
    q_row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    b, depth = q_row // num_draft, q_row % num_draft
    if (depth == 0) | (depth >= tl.load(lasts + b)):
        return
    reach = tl.load(reaches + b * (num_draft + 1) + depth)
    p_row = tl.load(first_rows + b) + depth
    columns = block * BLOCK + tl.arange(0, BLOCK)
    left = _left(
        p_logits, p_stride, p_maxima, p_sums, q_logits, q_stride, q_maxima, q_sums,
        p_row, q_row, reach, columns, num_tokens, num_blocks, BLOCKS,
    )  # fmt: skip
    tl.store(masses + q_row * num_blocks + block, tl.sum(tl.exp(left), axis=0))


@triton.jit(do_not_specialize=["num_draft"], do_not_specialize_on_alignment=["seeds", "positions"])
def _decide(
    reaches, lasts, masses, seeds, positions, accepted, num_draft, num_blocks, BLOCKS: tl.constexpr
):
    """Program b: the latest i below whose chance to stop its uniform falls; 0 if none does."""
    b = tl.program_id(0).to(tl.int64)
    last = tl.load(lasts + b)
    key = stream_key(tl.load(seeds + b), tl.load(positions + b), ACCEPT)
    blocks = tl.arange(0, BLOCKS)
    kept = tl.zeros((), tl.int64)
    for depth in range(1, num_draft + 1):
        if depth <= last:
            u = uniform(key, kept * 0 + depth - 1)
            reach = tl.load(reaches + b * (num_draft + 1) + depth).to(tl.float64)
            inside = blocks < tl.where(depth < last, num_blocks, 0)
            parts = tl.load(
                masses + (b * num_draft + depth) * num_blocks + blocks, mask=inside, other=0.0
            )
            mass = tl.sum(parts.to(tl.float64), axis=0)
            stands = tl.where(
                depth == last, tl.log(u) < reach, u * (mass + (1.0 - tl.exp(reach))) < mass
            )
            kept = tl.where(stands, kept * 0 + depth, kept)
    tl.store(accepted + b, kept)


@triton.jit(
    do_not_specialize=["num_draft"],
    do_not_specialize_on_alignment=["lengths", "first_rows", "seeds", "positions"],
)
def _race(
    p_logits,  # [R, V]
    p_stride,  # of a row of p_logits
    p_maxima,  # [R, blocks] float32
    p_sums,  # [R, blocks] float32, of exp(p - maximum)
    q_logits,  # [B * K, V]
    q_stride,  # of a row of q_logits
    q_maxima,  # [B * K, blocks] float32
    q_sums,  # [B * K, blocks] float32
    lengths,  # [B] int64
    first_rows,  # [B] int64, first row of p of each request
    reaches,  # [B, K + 1] float32
    lasts,  # [B] int64
    seeds,  # [B] int64
    positions,  # [B] int64
    accepted,  # [B] int64
    scores,  # [B, blocks, 2] float64, written
    winners,  # [B, blocks, 2] int32, written
    num_draft,  # K
    num_tokens,  # V
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (b, block): the best token of the block for the residual (slot 0) and for p itself
    (slot 1, the fallback)."""
    b = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    kept = tl.load(accepted + b)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    p_row = tl.load(first_rows + b) + kept
    p = clean(
        tl.load(p_logits + p_row * p_stride + columns, mask=columns < num_tokens, other=MINUS_INF)
    )
    purpose = tl.where(kept < tl.load(lengths + b), RESIDUAL, BONUS)
    noise = log_noise(
        stream_key(tl.load(seeds + b), tl.load(positions + b) + kept, purpose), columns
    )
    distribution = p
    if kept < tl.load(lasts + b):
        reach = tl.load(reaches + b * (num_draft + 1) + kept)
        distribution = _left(
            p_logits, p_stride, p_maxima, p_sums, q_logits, q_stride, q_maxima, q_sums,
            p_row, b * num_draft + kept, reach, columns, num_tokens, num_blocks, BLOCKS,
        )  # fmt: skip
    keep_best(distribution, noise, scores, winners, b, block, num_blocks, 0, BLOCK)
    keep_best(p, noise, scores, winners, b, block, num_blocks, 1, BLOCK)


@on_its_device
def verify_block_triton(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    sizes: torch.Tensor | None = None,
    block: int = BLOCK,
) -> Verdict:
    """`block.verify_block` in float32; `block` tokens of the vocabulary per program."""
    if q_logits is None or draft_tokens.shape[1] == 0:
        return verify_chain_triton(
            p_logits, draft_tokens, lengths, None, seeds, positions, sizes=sizes, block=block
        )
    num_requests, num_draft = draft_tokens.shape
    num_tokens = p_logits.shape[-1]
    block = min(block, triton.next_power_of_2(num_tokens))
    num_blocks = triton.cdiv(num_tokens, block)
    blocks = triton.next_power_of_2(num_blocks)
    device = p_logits.device
    draft_tokens, lengths, seeds, positions = (
        t.contiguous() for t in (draft_tokens, lengths, seeds, positions)
    )
    first_rows = rows_before(lengths, sizes)
    accepted, lasts = (
        torch.empty(num_requests, dtype=torch.int64, device=device) for _ in range(2)
    )
    reaches = torch.empty(num_requests, num_draft + 1, dtype=torch.float32, device=device)
    masses = torch.empty(num_requests, num_draft, num_blocks, dtype=torch.float32, device=device)
    scores = torch.empty(num_requests, num_blocks, 2, dtype=torch.float64, device=device)
    winners = torch.empty(num_requests, num_blocks, 2, dtype=torch.int32, device=device)
    tokens = torch.empty(num_requests, num_draft + 1, dtype=torch.int64, device=device)
    if num_requests == 0:
        return Verdict(accepted, tokens)
    p_rows, q_rows = contiguous_rows(p_logits), contiguous_rows(q_logits.flatten(0, 1))
    p_stats = block_stats(p_rows, lengths, 0, block, num_blocks)
    q_stats = block_stats(q_rows, lengths, num_draft, block, num_blocks)
    distributions = (p_rows, p_rows.stride(0), *p_stats, q_rows, q_rows.stride(0), *q_stats)
    paths = (first_rows, reaches, lasts)
    sizes = (num_draft, num_tokens, num_blocks)
    _reach[(num_requests,)](
        *distributions,
        draft_tokens,
        lengths,
        *paths,
        num_draft,
        num_blocks,
        BLOCKS=blocks,
        num_warps=1,
    )
    _mass[(num_requests * num_draft, num_blocks)](
        *distributions, *paths, masses, *sizes, BLOCK=block, BLOCKS=blocks
    )
    _decide[(num_requests,)](
        reaches,
        lasts,
        masses,
        seeds,
        positions,
        accepted,
        num_draft,
        num_blocks,
        BLOCKS=blocks,
        num_warps=1,
    )
    streams = (seeds, positions, accepted)
    _race[(num_requests, num_blocks)](
        *distributions,
        lengths,
        *paths,
        *streams,
        scores,
        winners,
        *sizes,
        BLOCK=block,
        BLOCKS=blocks,
        num_warps=8,
    )
    columns = max(FEWEST_DEPTHS, triton.next_power_of_2(num_draft + 1))
    emit[(num_requests,)](
        draft_tokens,
        accepted,
        scores,
        winners,
        tokens,
        num_draft,
        num_blocks,
        COLUMNS=columns,
        BLOCKS=blocks,
        num_warps=1,
    )
    return Verdict(accepted, tokens)
