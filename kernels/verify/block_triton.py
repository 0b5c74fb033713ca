"""Block verification in Triton: five launches that read the distributions twice, and the deciding
rows once more.

1. `row_stats`: maximum and sum of exponentials of every block of every row.
2. `_reach`: one program a request: the normalisers of its rows, the reach r_i of its path after
  each draft, and after how many drafts the block ends.
3. `_mass`: one program a block of each draft distribution's row; its part of the mass of
  max(r_i p - q, 0).
4. `_decide`: one program a request finds the latest i at which its uniform lets the path stand.
5. `race`: one program a block of each deciding row; log of max(r_i p - q, 0), or of p, minus log
  E.

What is kept is O(rows x blocks). `block.verify_block` has the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device
from draftsmith.kernels.sampling.filters_triton import MINUS_INF, clean
from draftsmith.kernels.sampling.random_streams_triton import (
    ACCEPT,
    BONUS,
    RESIDUAL,
    stream_key,
    uniform,
)
from draftsmith.kernels.verify.chain_triton import verify_chain_triton
from draftsmith.kernels.verify.race_triton import race_rows, settle
from draftsmith.kernels.verify.rows_triton import (
    NUM_SCALES,
    at_depth,
    first_row,
    log_residual,
    logprob,
    measure_rows,
    normalisers,
    rows_of,
)
from draftsmith.kernels.verify.verdict import Drafts, Verdict

BLOCK = 4096


@triton.jit(
    do_not_specialize=["num_requests", "num_draft"],
    do_not_specialize_on_alignment=["draft_tokens", "lengths", "owned"],
)
def _reach(
    logits,  # [R, V]
    stride,  # of a row of logits
    q_logits,  # [B * K, V]
    q_stride,  # of a row of q_logits
    draft_tokens,  # [B, K] int64
    lengths,  # [B] int64
    owned,  # as `first_row` takes it
    maxima,  # [2 (p, q), B, K + 1, blocks] float32
    sums,  # [2, B, K + 1, blocks] float32
    normals,  # [B, K + 1, NUM_SCALES] float32, written: p_top, p_log_sum, q_top, q_log_sum, log r_i
    first_rows,  # [B] int64, written: first row of logits of each request
    lasts,  # [B] int64, written
    num_requests,  # B
    num_draft,  # K
    num_blocks,
    BLOCKS: tl.constexpr,
    DEPTHS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Program b: log r_i for i up to the end of request b's block, and where that is."""
    b = tl.program_id(0).to(tl.int64)
    depths = tl.arange(0, DEPTHS)
    length, first = tl.load(lengths + b), first_row(owned, b, num_requests, REQUESTS)
    tokens = tl.load(draft_tokens + b * num_draft + depths, mask=depths < length, other=-1)
    offered = tokens >= 0
    p = tl.load(logits + (first + depths) * stride + tokens, mask=offered, other=MINUS_INF)
    q = tl.load(
        q_logits + (b * num_draft + depths) * q_stride + tokens, mask=offered, other=MINUS_INF
    )
    rows = b * (num_draft + 1) + depths
    q_rows = num_requests * (num_draft + 1) + rows
    p_top, p_log_sum, _ = normalisers(maxima, sums, rows, depths <= length, num_blocks, BLOCKS)
    q_top, q_log_sum, _ = normalisers(maxima, sums, q_rows, depths < length, num_blocks, BLOCKS)
    steps = logprob(clean(p), p_top, p_log_sum) - logprob(clean(q), q_top, q_log_sum)
    last = tl.min(tl.where(clean(q) > MINUS_INF, DEPTHS, depths), axis=0)
    inside = depths <= num_draft
    tl.store(normals + rows * NUM_SCALES, p_top, mask=inside)
    tl.store(normals + rows * NUM_SCALES + 1, p_log_sum, mask=inside)
    tl.store(normals + rows * NUM_SCALES + 2, q_top, mask=inside)
    tl.store(normals + rows * NUM_SCALES + 3, q_log_sum, mask=inside)
    reach = tl.zeros((), tl.float32)
    normals += b * (num_draft + 1) * NUM_SCALES + 4
    tl.store(normals, reach)
    for depth in range(last):
        reach = tl.minimum(reach + at_depth(steps, depths, depth), 0.0)
        tl.store(normals + (depth + 1) * NUM_SCALES, reach)
    tl.store(first_rows + b, first)
    tl.store(lasts + b, last)


@triton.jit(do_not_specialize=["num_draft"])
def _mass(
    logits,  # [R, V]
    stride,  # of a row of logits
    q_logits,  # [B * K, V]
    q_stride,  # of a row of q_logits
    normals,  # [B, K + 1, NUM_SCALES] float32
    first_rows,  # [B] int64
    lasts,  # [B] int64
    masses,  # [B, K, blocks] float32, written
    num_draft,  # K
    num_tokens,  # V
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Program (b * K + i, block). A path without any draft needs no test, so that i = 0 is left
    out."""
    q_row, block = tl.program_id(0), tl.program_id(1)
    b, depth = q_row // num_draft, q_row % num_draft
    if (depth == 0) | (depth >= tl.load(lasts + b)):
        return
    q_row = q_row.to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    row = tl.load(first_rows + b) + depth
    p = clean(tl.load(logits + row * stride + columns, mask=inside, other=MINUS_INF))
    q = clean(tl.load(q_logits + q_row * q_stride + columns, mask=inside, other=MINUS_INF))
    normals += (q_row + b) * NUM_SCALES
    log_p = logprob(p, tl.load(normals), tl.load(normals + 1)) + tl.load(normals + 4)
    left = log_residual(log_p, logprob(q, tl.load(normals + 2), tl.load(normals + 3)))
    tl.store(masses + q_row * num_blocks + block, tl.sum(tl.exp(left), axis=0))


@triton.jit(
    do_not_specialize=["num_draft"],
    do_not_specialize_on_alignment=["draft_tokens", "lengths", "seeds", "positions"],
)
def _decide(
    draft_tokens,  # [B, K] int64
    lengths,  # [B] int64
    seeds,  # [B] int64
    positions,  # [B] int64
    normals,  # [B, K + 1, NUM_SCALES] float32
    first_rows,  # [B] int64
    lasts,  # [B] int64
    masses,  # [B, K, blocks] float32
    choices,  # [B, NUM_CHOICES] int64, written
    scales,  # [B, NUM_SCALES] float32, written
    raced,  # [B] int32, written
    verdicts,  # [B, K + 2] int64, written
    num_draft,  # K
    num_blocks,
    BLOCKS: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    """Program b: the latest i below whose chance to stop its uniform falls; 0 if none does."""
    b = tl.program_id(0).to(tl.int64)
    last, seed, position = tl.load(lasts + b), tl.load(seeds + b), tl.load(positions + b)
    key = stream_key(seed, position, ACCEPT)
    blocks = tl.arange(0, BLOCKS)
    normals += b * (num_draft + 1) * NUM_SCALES
    kept = tl.zeros((), tl.int64)
    for depth in range(1, num_draft + 1):
        if depth <= last:
            u = uniform(key, kept * 0 + depth - 1)
            reach = tl.load(normals + depth * NUM_SCALES + 4).to(tl.float64)
            inside = blocks < tl.where(depth < last, num_blocks, 0)
            parts = tl.load(
                masses + (b * num_draft + depth) * num_blocks + blocks, mask=inside, other=0.0
            )
            mass = tl.sum(parts.to(tl.float64), axis=0)
            stands = tl.where(
                depth == last, tl.log(u) < reach, u * (mass + (1.0 - tl.exp(reach))) < mass
            )
            kept = tl.where(stands, kept * 0 + depth, kept)
    depths = tl.arange(0, DEPTHS)
    tokens = tl.load(draft_tokens + b * num_draft + depths, mask=depths < kept, other=-1)
    purpose = tl.where(kept < tl.load(lengths + b), RESIDUAL, BONUS)
    settle(
        choices, raced, verdicts, b, kept, tokens, -1, tl.load(first_rows + b) + kept,
        b * num_draft + kept, -1, stream_key(seed, position + kept, purpose),
        kept < last, num_draft, depths,
    )  # fmt: skip
    numbers = tl.arange(0, NUM_SCALES)
    own = tl.load(normals + kept * NUM_SCALES + numbers)
    tl.store(scales + b * NUM_SCALES + numbers, own)


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
    drafts = Drafts(draft_tokens, lengths, q_logits, lengths if sizes is None else sizes)
    rows = rows_of(p_logits, None, None, drafts, num_requests, block)
    accepted, tokens = rows.verdicts.split([1, num_draft + 1], dim=1)
    verdict = Verdict(accepted.squeeze(1), tokens)
    if num_requests == 0:
        return verdict
    p, stride, _, _, q, q_stride = rows.distributions
    distributions, num_blocks = (p, stride, q, q_stride), rows.num_blocks
    num_tokens, device = p_logits.shape[-1], p_logits.device
    normals = torch.empty(
        num_requests, num_draft + 1, NUM_SCALES.value, dtype=torch.float32, device=device
    )
    masses = torch.empty(num_requests, num_draft, num_blocks, dtype=torch.float32, device=device)
    first_rows, lasts = (
        torch.empty(num_requests, dtype=torch.int64, device=device) for _ in range(2)
    )
    paths = normals, first_rows, lasts
    measure_rows(rows)
    _reach[(num_requests,)](
        *distributions,
        rows.tokens,
        rows.lengths,
        rows.owned,
        *rows.stats[:2],
        *paths,
        num_requests,
        num_draft,
        num_blocks,
        **rows.paddings,
        REQUESTS=rows.summed,
        num_warps=4,
    )
    _mass[(num_requests * num_draft, num_blocks)](
        *distributions, *paths, masses, num_draft, num_tokens, num_blocks, BLOCK=rows.block,
        num_warps=8,
    )  # fmt: skip
    _decide[(num_requests,)](
        rows.tokens,
        rows.lengths,
        seeds.contiguous(),
        positions.contiguous(),
        *paths,
        masses,
        *rows.decision,
        num_draft,
        num_blocks,
        **rows.paddings,
        num_warps=1,
    )
    race_rows(rows)
    return verdict
