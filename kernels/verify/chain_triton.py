"""Chain verification in Triton: four launches that read the distributions once, and the deciding
rows twice.

1. `row_stats`: maximum and sum of exponentials of every block of every row; together the row's
  normaliser.
2. `_decide`: one program per request walks its drafted tokens and counts the kept ones.
3. `_race`: one program per block of each deciding row; log of the residual max(p - q, 0), or of p
  for a bonus, minus log E.
4. `emit`: the winner of the blocks, and the row of output tokens.

No buffer of size [rows, V] is made; what is kept is O(rows x blocks). `verify.verify_chain_torch`
is the reference.
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
from draftsmith.kernels.verify.rows_triton import (
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


@triton.jit
def _decide(
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
    seeds,  # [B] int64
    positions,  # [B] int64
    accepted,  # [B] int64, written
    num_draft,  # K
    num_blocks,
    HAS_Q: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program b counts the kept prefix of request b."""
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + b)
    first = tl.load(first_rows + b)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    kept = tl.zeros((), tl.int64)
    alive = length >= 0
    for depth in range(num_draft):
        token = tl.load(draft_tokens + b * num_draft + depth)
        alive = alive & (depth < length) & (token >= 0)
        if alive:
            row = first + depth
            p = clean(tl.load(p_logits + row * p_stride + token))
            p_top, p_log_sum = normaliser(p_maxima, p_sums, row, num_blocks, BLOCKS)
            log_p = logprob(p, p_top, p_log_sum)
            log_q = tl.zeros((), tl.float32)
            if HAS_Q:
                q_row = b * num_draft + depth
                q = clean(tl.load(q_logits + q_row * q_stride + token))
                q_top, q_log_sum = normaliser(q_maxima, q_sums, q_row, num_blocks, BLOCKS)
                log_q = logprob(q, q_top, q_log_sum)
            log_u = tl.log(uniform(stream_key(seed, position + depth, ACCEPT), 0))
            keep = (log_u + log_q.to(tl.float64) < log_p.to(tl.float64)) & (log_q > MINUS_INF)
            kept += keep.to(tl.int64)
            alive = keep
    tl.store(accepted + b, kept)


@triton.jit
def _race(
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
    seeds,  # [B] int64
    positions,  # [B] int64
    accepted,  # [B] int64
    scores,  # [B, blocks, 2] float64, written
    winners,  # [B, blocks, 2] int32, written
    num_draft,  # K
    num_tokens,  # V
    num_blocks,
    HAS_Q: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (b, block): the best token of the block for the residual (slot 0) and for p itself
    (slot 1, the fallback)."""
    b = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    kept = tl.load(accepted + b)
    rejected = kept < tl.load(lengths + b)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    row = tl.load(first_rows + b) + kept
    p = clean(tl.load(p_logits + row * p_stride + columns, mask=inside, other=MINUS_INF))
    purpose = tl.where(rejected, RESIDUAL, BONUS)
    noise = log_noise(
        stream_key(tl.load(seeds + b), tl.load(positions + b) + kept, purpose), columns
    )
    distribution = p
    if rejected:
        p_top, p_log_sum = normaliser(p_maxima, p_sums, row, num_blocks, BLOCKS)
        log_p = logprob(p, p_top, p_log_sum)
        token = tl.load(draft_tokens + b * num_draft + kept)
        if HAS_Q:
            q_row = b * num_draft + kept
            # A token that q could not have drawn is no draft: as if q had no mass, p answers.
            drawn = (
                clean(
                    tl.load(q_logits + q_row * q_stride + token, mask=token >= 0, other=MINUS_INF)
                )
                > MINUS_INF
            )
            q = clean(tl.load(q_logits + q_row * q_stride + columns, mask=inside, other=MINUS_INF))
            q_top, q_log_sum = normaliser(q_maxima, q_sums, q_row, num_blocks, BLOCKS)
            log_q = tl.where(drawn, logprob(q, q_top, q_log_sum), MINUS_INF)
        else:
            log_q = tl.where(columns == token, 0.0, MINUS_INF)
        distribution = log_residual(log_p, log_q)
    keep_best(distribution, noise, scores, winners, b, block, num_blocks, 0, BLOCK)
    keep_best(p, noise, scores, winners, b, block, num_blocks, 1, BLOCK)


@on_its_device
def verify_chain_triton(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    block: int = BLOCK,
) -> Verdict:
    """`verify.verify_chain` in float32; `block` tokens of the vocabulary per program."""
    num_requests, num_draft = draft_tokens.shape
    num_tokens = p_logits.shape[-1]
    block = min(block, triton.next_power_of_2(num_tokens))
    num_blocks = triton.cdiv(num_tokens, block)
    device = p_logits.device
    draft_tokens, lengths, seeds, positions = (
        t.contiguous() for t in (draft_tokens, lengths, seeds, positions)
    )
    first_rows = torch.cumsum(lengths + 1, 0) - (lengths + 1)
    p_logits = contiguous_rows(p_logits)
    p_stats = block_stats(p_logits, lengths, 0, block, num_blocks)
    # Without draft distributions the kernels get p in their place and never read it.
    given = None if num_draft == 0 else q_logits
    has_q = given is not None
    q_rows = p_logits if given is None else contiguous_rows(given.flatten(0, 1))
    q_stats = block_stats(q_rows, lengths, num_draft, block, num_blocks) if has_q else p_stats
    accepted = torch.empty(num_requests, dtype=torch.int64, device=device)
    scores = torch.empty(num_requests, num_blocks, 2, dtype=torch.float64, device=device)
    winners = torch.empty(num_requests, num_blocks, 2, dtype=torch.int32, device=device)
    tokens = torch.empty(num_requests, num_draft + 1, dtype=torch.int64, device=device)
    blocks = triton.next_power_of_2(num_blocks)
    distributions = (p_logits, p_logits.stride(0), *p_stats, q_rows, q_rows.stride(0), *q_stats)
    requests = (draft_tokens, lengths, first_rows, seeds, positions, accepted)
    if num_requests:
        _decide[(num_requests,)](
            *distributions,
            *requests,
            num_draft,
            num_blocks,
            HAS_Q=has_q,
            BLOCKS=blocks,
            num_warps=1,
        )
        _race[(num_requests, num_blocks)](
            *distributions,
            *requests,
            scores,
            winners,
            num_draft,
            num_tokens,
            num_blocks,
            HAS_Q=has_q,
            BLOCK=block,
            BLOCKS=blocks,
            num_warps=8,
        )
        columns = triton.next_power_of_2(num_draft + 1)
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
