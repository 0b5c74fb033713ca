"""Chain verification in Triton: four launches that read the laws once, and the deciding rows twice.

1. `_row_stats`: maximum and sum of exponentials of every block of every row; their logsumexp is the row's normaliser.
2. `_decide`: one program a request walks its drafted tokens and counts the kept ones.
3. `_race`: one program a block of each deciding row; log of the residual max(p - q, 0), or of p for a bonus, minus log E.
4. `_emit`: the winner of the blocks, and the row of output tokens.

No buffer of size [rows, V] is made; what is kept is O(rows x blocks). `verify.verify_chain_torch` is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.randomness_triton import ACCEPT, BONUS, RESIDUAL, log_noise, stream_key, uniform
from draftsmith.kernels.verify import Verdict

BLOCK = 4096
_LARGEST = tl.constexpr(3.4028234663852886e38)
_MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def _clean(x):
    """float32 logits with NaN as -inf and +inf as the largest float."""
    x = x.to(tl.float32)
    return tl.minimum(tl.where(x != x, _MINUS_INF, x), _LARGEST)


@triton.jit
def _row_stats(
    logits, stride, lengths, per_request, num_tokens, maxima, sums, num_blocks, GROUPED: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, block). `GROUPED` rows come `per_request` at a time, and only the first `lengths` of a group count."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    # Nested, so that the load is not even compiled for rows without groups.
    if GROUPED:  # noqa: SIM102
        if row % per_request >= tl.load(lengths + row // per_request):
            return
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = _clean(tl.load(logits + row * stride + columns, mask=columns < num_tokens, other=_MINUS_INF))
    top = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - tl.where(top == _MINUS_INF, 0.0, top)), axis=0)
    tl.store(maxima + row * num_blocks + block, top)
    tl.store(sums + row * num_blocks + block, total)


@triton.jit
def _normaliser(maxima, sums, row, num_blocks, BLOCKS: tl.constexpr):
    """logsumexp of a row from its blocks; -inf for a row without mass."""
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    tops = tl.load(maxima + row * num_blocks + blocks, mask=inside, other=_MINUS_INF)
    totals = tl.load(sums + row * num_blocks + blocks, mask=inside, other=0.0)
    top = tl.max(tops, axis=0)
    shift = tl.where(top == _MINUS_INF, 0.0, top)
    total = tl.sum(totals * tl.exp(tops - shift), axis=0)
    return tl.where(top == _MINUS_INF, _MINUS_INF, shift + tl.log(tl.where(total > 0, total, 1.0)))


@triton.jit
def _logprob(x, normaliser):
    """-inf minus -inf is no number; a law without mass gives -inf everywhere."""
    return tl.where(normaliser == _MINUS_INF, _MINUS_INF, x - tl.where(normaliser == _MINUS_INF, 0.0, normaliser))


@triton.jit
def _decide(
    p_logits,
    p_stride,
    p_maxima,
    p_sums,
    q_logits,
    q_stride,
    q_maxima,
    q_sums,
    draft_tokens,
    lengths,
    first_rows,
    seeds,
    positions,
    accepted,
    num_draft,
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
        offered = alive & (depth < length) & (token >= 0)
        if offered:
            row = first + depth
            p = _clean(tl.load(p_logits + row * p_stride + token))
            log_p = _logprob(p, _normaliser(p_maxima, p_sums, row, num_blocks, BLOCKS))
            log_q = tl.zeros((), tl.float32)
            if HAS_Q:
                q_row = b * num_draft + depth
                q = _clean(tl.load(q_logits + q_row * q_stride + token))
                log_q = _logprob(q, _normaliser(q_maxima, q_sums, q_row, num_blocks, BLOCKS))
            log_u = tl.log(uniform(stream_key(seed, position + depth, ACCEPT), 0))
            keep = (log_u + log_q.to(tl.float64) < log_p.to(tl.float64)) & (log_q > _MINUS_INF)
            kept += keep.to(tl.int64)
            alive = keep
        else:
            alive = alive & False
    tl.store(accepted + b, kept)


@triton.jit
def _log_residual(log_p, log_q):
    """log max(p - q, 0) elementwise: log p + log(1 - exp(log q - log p))."""
    gap = tl.where(log_q == _MINUS_INF, _MINUS_INF, log_q - tl.where(log_p == _MINUS_INF, 0.0, log_p))
    small = -gap * (1.0 + gap * (0.5 + gap * (0.16666667 + gap * 0.041666668)))
    rest = tl.where(gap > -0.03125, small, 1.0 - tl.exp(gap))
    positive = (gap < 0.0) & (log_p > _MINUS_INF)
    return tl.where(positive, log_p + tl.log(tl.where(positive, rest, 1.0)), _MINUS_INF)


@triton.jit
def _race(
    p_logits,
    p_stride,
    p_maxima,
    p_sums,
    q_logits,
    q_stride,
    q_maxima,
    q_sums,
    draft_tokens,
    lengths,
    first_rows,
    seeds,
    positions,
    accepted,
    scores,
    winners,
    num_draft,
    num_tokens,
    num_blocks,
    HAS_Q: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (b, block): the best token of the block for the residual (slot 0) and for p itself (slot 1, the fallback)."""
    b = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    kept = tl.load(accepted + b)
    rejected = kept < tl.load(lengths + b)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    row = tl.load(first_rows + b) + kept
    p = _clean(tl.load(p_logits + row * p_stride + columns, mask=inside, other=_MINUS_INF))
    purpose = tl.where(rejected, RESIDUAL, BONUS)
    noise = log_noise(stream_key(tl.load(seeds + b), tl.load(positions + b) + kept, purpose), columns)
    law = p
    if rejected:
        log_p = _logprob(p, _normaliser(p_maxima, p_sums, row, num_blocks, BLOCKS))
        token = tl.load(draft_tokens + b * num_draft + kept)
        if HAS_Q:
            q_row = b * num_draft + kept
            # A token that q could not have drawn is no draft: as if q had no mass, p answers.
            drawn = _clean(tl.load(q_logits + q_row * q_stride + token, mask=token >= 0, other=_MINUS_INF)) > _MINUS_INF
            q = _clean(tl.load(q_logits + q_row * q_stride + columns, mask=inside, other=_MINUS_INF))
            log_q = _logprob(q, _normaliser(q_maxima, q_sums, q_row, num_blocks, BLOCKS))
            log_q = tl.where(drawn, log_q, _MINUS_INF)
        else:
            log_q = tl.where(columns == token, 0.0, _MINUS_INF)
        law = _log_residual(log_p, log_q)
    slot = (b * num_blocks + block) * 2
    best, at = tl.max(law - noise, axis=0, return_indices=True)
    tl.store(scores + slot, best)
    tl.store(winners + slot, block * BLOCK + at)
    best, at = tl.max(p - noise, axis=0, return_indices=True)
    tl.store(scores + slot + 1, best)
    tl.store(winners + slot + 1, block * BLOCK + at)


@triton.jit
def _winner(scores, winners, b, slot, num_blocks, BLOCKS: tl.constexpr):
    """The best block's token; -1 when every score is -inf."""
    blocks = tl.arange(0, BLOCKS)
    values = tl.load(scores + (b * num_blocks + blocks) * 2 + slot, mask=blocks < num_blocks, other=_MINUS_INF)
    best, at = tl.max(values, axis=0, return_indices=True)
    token = tl.load(winners + (b * num_blocks + at) * 2 + slot)
    return tl.where(best == _MINUS_INF, -1, token)


@triton.jit
def _emit(draft_tokens, accepted, scores, winners, tokens, num_draft, num_blocks, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr):
    """Program b writes row b of the output: kept drafts, the winner, -1."""
    b = tl.program_id(0).to(tl.int64)
    kept = tl.load(accepted + b)
    token = _winner(scores, winners, b, 0, num_blocks, BLOCKS)
    token = tl.where(token < 0, _winner(scores, winners, b, 1, num_blocks, BLOCKS), token)
    columns = tl.arange(0, COLUMNS)
    drafts = tl.load(draft_tokens + b * num_draft + columns, mask=columns < kept, other=-1)
    output = tl.where(columns == kept, token.to(tl.int64), drafts)
    tl.store(tokens + b * (num_draft + 1) + columns, output, mask=columns <= num_draft)


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
    """`verify.verify_chain` in float32; `block` tokens of the vocabulary a program."""
    num_requests, num_draft = draft_tokens.shape
    num_tokens = p_logits.shape[-1]
    block = min(block, triton.next_power_of_2(num_tokens))
    num_blocks = triton.cdiv(num_tokens, block)
    device = p_logits.device
    draft_tokens, lengths, seeds, positions = (t.contiguous() for t in (draft_tokens, lengths, seeds, positions))
    first_rows = torch.cumsum(lengths + 1, 0) - (lengths + 1)
    p_logits = _rows(p_logits)
    p_stats = _stats(p_logits, lengths, 0, block, num_blocks)
    # Without draft laws the kernels get p in their place and never read it.
    has_q = q_logits is not None and num_draft > 0
    q_rows = _rows(q_logits.flatten(0, 1)) if has_q else p_logits
    q_stats = _stats(q_rows, lengths, num_draft, block, num_blocks) if has_q else p_stats
    accepted = torch.empty(num_requests, dtype=torch.int64, device=device)
    scores = torch.empty(num_requests, num_blocks, 2, dtype=torch.float32, device=device)
    winners = torch.empty(num_requests, num_blocks, 2, dtype=torch.int32, device=device)
    tokens = torch.empty(num_requests, num_draft + 1, dtype=torch.int64, device=device)
    blocks = triton.next_power_of_2(num_blocks)
    laws = (p_logits, p_logits.stride(0), *p_stats, q_rows, q_rows.stride(0), *q_stats)
    requests = (draft_tokens, lengths, first_rows, seeds, positions, accepted)
    if num_requests:
        _decide[(num_requests,)](*laws, *requests, num_draft, num_blocks, HAS_Q=has_q, BLOCKS=blocks, num_warps=1)
        _race[(num_requests, num_blocks)](
            *laws,
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
        _emit[(num_requests,)](
            draft_tokens, accepted, scores, winners, tokens, num_draft, num_blocks, COLUMNS=columns, BLOCKS=blocks, num_warps=1
        )
    return Verdict(accepted, tokens)


def _rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _stats(
    rows: torch.Tensor, lengths: torch.Tensor, per_request: int, block: int, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    maxima, sums = (torch.empty(len(rows), num_blocks, dtype=torch.float32, device=rows.device) for _ in range(2))
    if len(rows):
        _row_stats[(len(rows), num_blocks)](
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
