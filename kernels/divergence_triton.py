"""Forward KL of rows in Triton: one program a row, the logits read twice, the gradient written once.

The first walk gathers the normalisers (online softmax: a running maximum and a sum that is rescaled when it moves) and, for a
draft vocabulary, the target's mass in it; the second one the sums and the gradient. The reference is
`divergence.forward_kl_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.divergence import LOG_ZERO, RowTerms, draft_columns

BLOCK = 4096
_MINUS_INF = tl.constexpr(float("-inf"))
_LOG_ZERO = tl.constexpr(LOG_ZERO)


@triton.jit
def _online(x, top, total):
    """Takes a block of logits into the running (maximum, sum of exponentials)."""
    new_top = tl.maximum(top, tl.max(x, axis=0))
    shift = tl.where(new_top == _MINUS_INF, 0.0, new_top)
    return new_top, total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), axis=0)


@triton.jit
def _forward_kl_rows(
    draft_logits,
    draft_stride,
    target_logits,
    target_stride,
    weights,
    vocab_map,
    columns,
    tokens,
    kl,
    alpha,
    keep,
    outside,
    grad,
    num_draft_tokens,
    num_target_tokens,
    HAS_MAP: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    draft, target = draft_logits + row * draft_stride, target_logits + row * target_stride
    lanes = tl.arange(0, BLOCK)
    top_p, sum_p = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for begin in range(0, num_target_tokens, BLOCK):
        at = begin + lanes
        x = tl.load(target + at, mask=at < num_target_tokens, other=_MINUS_INF).to(tl.float32)
        top_p, sum_p = _online(x, top_p, sum_p)
    top_q, sum_q = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    mass = tl.full((), 0.0, tl.float32)
    for begin in range(0, num_draft_tokens, BLOCK):
        at = begin + lanes
        inside = at < num_draft_tokens
        z = tl.load(draft + at, mask=inside, other=_MINUS_INF).to(tl.float32)
        top_q, sum_q = _online(z, top_q, sum_q)
        if HAS_MAP:
            ids = tl.load(vocab_map + at, mask=inside, other=0)
            x = tl.load(target + ids, mask=inside, other=_MINUS_INF).to(tl.float32)
            mass += tl.sum(tl.exp(x - top_p), axis=0)
    log_norm_p, log_norm_q = top_p + tl.log(sum_p), top_q + tl.log(sum_q)
    if HAS_MAP:
        mass = mass / sum_p
    else:
        mass = tl.full((), 1.0, tl.float32)

    weight = tl.load(weights + row)
    sum_kl, sum_alpha = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for begin in range(0, num_draft_tokens, BLOCK):
        at = begin + lanes
        inside = at < num_draft_tokens
        ids = at
        if HAS_MAP:
            ids = tl.load(vocab_map + at, mask=inside, other=0)
        z = tl.load(draft + at, mask=inside, other=_MINUS_INF).to(tl.float32)
        x = tl.load(target + ids, mask=inside, other=_MINUS_INF).to(tl.float32)
        log_p = tl.maximum(x - log_norm_p, _LOG_ZERO)
        log_q = tl.maximum(z - log_norm_q, _LOG_ZERO)
        p, q = tl.exp(log_p), tl.exp(log_q)
        sum_kl += tl.sum(p * (log_p - log_q), axis=0)
        sum_alpha += tl.sum(tl.minimum(p, q), axis=0)
        slope = tl.where(weight != 0, weight * (q * mass - p), 0.0)
        tl.store(grad + row * num_draft_tokens + at, slope, mask=inside)

    tl.store(kl + row, tl.where(weight != 0, weight * sum_kl, 0.0))
    tl.store(alpha + row, sum_alpha)
    tl.store(outside + row, tl.maximum(1.0 - mass, 0.0))
    if HAS_TOKENS:
        column = tl.load(columns + row)
        z = tl.load(draft + tl.maximum(column, 0)).to(tl.float32)
        x = tl.load(target + tl.load(tokens + row)).to(tl.float32)
        log_p = tl.maximum(x - log_norm_p, _LOG_ZERO)
        log_q = tl.maximum(z - log_norm_q, _LOG_ZERO)
        tl.store(keep + row, tl.where(column >= 0, tl.exp(tl.minimum(log_q - log_p, 0.0)), 0.0))


def forward_kl_rows_triton(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    weights: torch.Tensor,
    vocab_map: torch.Tensor | None,
    tokens: torch.Tensor | None,
    *,
    block: int = BLOCK,
) -> RowTerms:
    """`divergence.forward_kl_rows` in float32; `block` tokens of the vocabulary a step."""
    num_rows, num_draft_tokens = draft_logits.shape
    draft_logits, target_logits = _rows(draft_logits), _rows(target_logits)
    weights = weights.float().contiguous()
    kl, alpha, keep, outside = (torch.empty(num_rows, dtype=torch.float32, device=weights.device) for _ in range(4))
    grad = torch.empty(num_rows, num_draft_tokens, dtype=draft_logits.dtype, device=weights.device)
    # Arguments that a variant of the kernel does not read still need a pointer.
    columns = weights if tokens is None else draft_columns(tokens, vocab_map, target_logits.shape[-1])
    if num_rows:
        _forward_kl_rows[(num_rows,)](
            draft_logits,
            draft_logits.stride(0),
            target_logits,
            target_logits.stride(0),
            weights,
            weights if vocab_map is None else vocab_map.contiguous(),
            columns,
            weights if tokens is None else tokens.contiguous(),
            kl,
            alpha,
            keep,
            outside,
            grad,
            num_draft_tokens,
            target_logits.shape[-1],
            HAS_MAP=vocab_map is not None,
            HAS_TOKENS=tokens is not None,
            BLOCK=min(block, triton.next_power_of_2(max(num_draft_tokens, target_logits.shape[-1]))),
            num_warps=8,
        )
    return RowTerms(kl, alpha, None if tokens is None else keep, outside, grad)


def _rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()
