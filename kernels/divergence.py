"""Forward KL of a draft against the target from hidden states, in chunks of rows, so that nothing of size [T, V] is kept.

For row t with target law p (normalised over the full target vocabulary) and draft law q = softmax(z) over the draft vocabulary S:

    KL_t = sum_{v in S} p_v (log p_v - log q_v)         dKL_t / dz_v = m q_v - p_v,  m = sum_{v in S} p_v

The gradient needs no second pass over the logits, so forward computes it (as Liger's fused losses do) and backward scales it.

Legend: T rows, H draft width, V target vocabulary, Vd draft vocabulary (V without a subset), t rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import choose
from draftsmith.kernels.laws import TopLaw

CHUNK_ELEMENTS = 1 << 24  # logits of one chunk on an accelerator: 64 MiB in float32
# On a CPU a chunk that stays in its cache is twice as fast (768 x 4096: 54 ms in chunks of 128 rows, 115 ms whole), but the
# draft head is read once a chunk, so there must be rows enough to pay for that.
CPU_CHUNK_ELEMENTS, CPU_CHUNK_ROWS = 1 << 19, 128
LOG_ZERO = -1e30  # stands in for log 0 where it meets a zero weight; 0 * -inf would be NaN

TargetLogits = Callable[[slice], torch.Tensor]


class Divergence(NamedTuple):
    loss: torch.Tensor  # scalar, sum_t weights_t KL_t; the caller divides by what it means by a mean
    alpha: torch.Tensor  # [T] sum_v min(p_v, q_v); no gradient
    keep: torch.Tensor | None  # [T] min(1, q(x) / p(x)) at the given tokens; 0 outside the draft vocabulary; no gradient
    outside: torch.Tensor  # [T] target mass outside the draft vocabulary; no gradient


class RowTerms(NamedTuple):
    """What one chunk yields. A row of weight 0 may hold anything, NaN included; its kl and grad are 0 all the same."""

    kl: torch.Tensor  # [t], weighted
    alpha: torch.Tensor  # [t]
    keep: torch.Tensor | None  # [t]
    outside: torch.Tensor  # [t]
    grad: torch.Tensor  # [t, Vd] weight * dKL/dz, in the dtype of the draft logits


def forward_kl(
    draft_hidden: torch.Tensor,
    draft_head: torch.Tensor,
    target_logits: TargetLogits,
    weights: torch.Tensor,
    *,
    vocab_map: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
) -> Divergence:
    """Weighted sum of KL(p || q) over rows, with exact gradients to `draft_hidden` and `draft_head`.

    Args:
        draft_hidden: [T, H].
        draft_head: [Vd, H]; logits are `draft_hidden @ draft_head.T`. When it needs a gradient, one [Vd, H] buffer a call is
            held until backward.
        target_logits: gives the target's raw logits [t, V] of a slice of rows; called without gradients, once a slice.
        weights: [T], constant; a row of weight 0 adds exactly nothing to loss and gradients.
        vocab_map: [Vd] target id of each draft id; None when the vocabularies are the same.
        tokens: [T] target ids that `keep` is wanted for.
        impl: "auto", "triton" or "torch", for the row-wise part; the products are torch's.
        chunk_size: rows a chunk; by default what suits the device.
    """
    if impl == "auto" and draft_hidden.dtype == torch.float64:
        impl = "torch"  # the Triton kernel computes in float32
    rows = _row_function(choose(impl, draft_hidden.device))
    chunk_size = chunk_size or default_chunk_size(draft_hidden.device, len(draft_head))
    job = _Job(target_logits, weights, vocab_map, tokens, rows, chunk_size)
    return Divergence(*_ForwardKL.apply(draft_hidden, draft_head, job))


def default_chunk_size(device: torch.device, vocab_size: int) -> int:
    if device.type == "cpu":
        return max(CPU_CHUNK_ROWS, CPU_CHUNK_ELEMENTS // vocab_size)
    return max(1, CHUNK_ELEMENTS // vocab_size)


RowFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], RowTerms]


def _row_function(impl: str) -> RowFunction:
    if impl == "triton":
        from draftsmith.kernels.divergence_triton import forward_kl_rows_triton

        return forward_kl_rows_triton
    return forward_kl_rows


def forward_kl_rows(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    weights: torch.Tensor,
    vocab_map: torch.Tensor | None,
    tokens: torch.Tensor | None,
) -> RowTerms:
    """The reference: raw logits [t, Vd] and [t, V], weights [t] -> terms of every row. Computes in the dtype of the weights."""
    log_q = torch.log_softmax(draft_logits.to(weights.dtype), dim=-1).clamp_(min=LOG_ZERO)
    wide_target = target_logits.to(weights.dtype)
    normaliser = torch.logsumexp(wide_target, dim=-1, keepdim=True)
    inside = wide_target if vocab_map is None else wide_target[:, vocab_map]
    log_p = (inside - normaliser).clamp_(min=LOG_ZERO)
    p, q = log_p.exp(), log_q.exp()
    mass = p.sum(dim=-1)
    alpha = torch.minimum(p, q).sum(dim=-1)
    # In place from here on: on a CPU the time goes into passes over these rows.
    log_ratio = log_p.sub_(log_q)
    keep = None
    if tokens is not None:
        column = draft_columns(tokens, vocab_map, target_logits.shape[-1])
        ratio = (-log_ratio.gather(-1, column.clamp(min=0)[:, None]))[:, 0].clamp(max=0).exp()
        keep = torch.where(column >= 0, ratio, 0.0)
    outside = torch.zeros_like(mass) if vocab_map is None else (1 - mass).clamp(min=0)
    counted = weights != 0
    kl = torch.where(counted, weights * log_ratio.mul_(p).sum(dim=-1), 0.0)
    grad = q.mul_(mass[:, None]).sub_(p).mul_(weights[:, None]).masked_fill_(~counted[:, None], 0.0)
    return RowTerms(kl, alpha, keep, outside, grad.to(draft_logits.dtype))


def draft_columns(tokens: torch.Tensor, vocab_map: torch.Tensor | None, num_target_tokens: int) -> torch.Tensor:
    """Target ids [t] -> draft ids [t], -1 for those the draft vocabulary lacks."""
    if vocab_map is None:
        return tokens
    inverse = torch.full((num_target_tokens,), -1, dtype=torch.int64, device=tokens.device)
    inverse[vocab_map] = torch.arange(len(vocab_map), device=tokens.device)
    return inverse[tokens]


class _Fused(NamedTuple):
    loss: torch.Tensor
    alpha: torch.Tensor
    keep: torch.Tensor | None
    outside: torch.Tensor
    grad_hidden: torch.Tensor | None
    grad_head: torch.Tensor | None


class _Job(NamedTuple):
    """The arguments of one call that carry no gradient."""

    target_logits: TargetLogits
    weights: torch.Tensor
    vocab_map: torch.Tensor | None
    tokens: torch.Tensor | None
    rows: RowFunction
    chunk_size: int


def _fused(hidden: torch.Tensor, head: torch.Tensor, job: _Job, *, wants_hidden: bool, wants_head: bool) -> _Fused:
    """Loss and gradients in one walk over the chunks."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
    grad_head = torch.zeros_like(head, dtype=wide) if wants_head else None
    head = head.to(hidden.dtype)
    weights = job.weights.detach().to(wide)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    chunks: list[RowTerms] = []
    for begin in range(0, len(hidden), job.chunk_size):
        part = slice(begin, min(begin + job.chunk_size, len(hidden)))
        draft_logits = hidden[part] @ head.T
        target = job.target_logits(part).detach()
        _check_sizes(draft_logits, target, job.vocab_map)
        tokens = None if job.tokens is None else job.tokens[part]
        terms = job.rows(draft_logits, target, weights[part], job.vocab_map, tokens)
        loss += terms.kl.sum()
        grad = terms.grad.to(hidden.dtype)
        if wants_hidden:
            grad_hidden[part] = grad @ head
        if wants_head:
            # 0 * NaN is NaN: the hidden state of a row without weight must not reach the product either.
            grad_head += grad.T @ torch.where((weights[part] != 0)[:, None], hidden[part], 0.0)
        chunks.append(terms._replace(grad=loss))
    alpha = _join([terms.alpha for terms in chunks], loss)
    keep = None if job.tokens is None else _join([terms.keep for terms in chunks], loss)
    outside = _join([terms.outside for terms in chunks], loss)
    return _Fused(loss, alpha, keep, outside, grad_hidden, grad_head)


class _ForwardKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, draft_hidden, draft_head, job):
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        fused = _fused(draft_hidden.detach(), draft_head.detach(), job, wants_hidden=wants_hidden, wants_head=wants_head)
        ctx.grads = fused.grad_hidden, fused.grad_head
        ctx.head_dtype = draft_head.dtype
        ctx.mark_non_differentiable(*(t for t in (fused.alpha, fused.keep, fused.outside) if t is not None))
        return fused.loss, fused.alpha, fused.keep, fused.outside

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        grad_hidden, grad_head = ctx.grads
        grad_hidden = None if grad_hidden is None else grad_hidden * grad_loss.to(grad_hidden.dtype)
        grad_head = None if grad_head is None else (grad_head * grad_loss).to(ctx.head_dtype)
        return grad_hidden, grad_head, None


def _join(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts) if parts else like.new_zeros(0)


def _check_sizes(draft_logits: torch.Tensor, target_logits: torch.Tensor, vocab_map: torch.Tensor | None) -> None:
    if target_logits.shape[0] != draft_logits.shape[0]:
        raise ValueError(f"target_logits gave {target_logits.shape[0]} rows for a slice of {draft_logits.shape[0]}")
    num_mapped = target_logits.shape[-1] if vocab_map is None else len(vocab_map)
    if num_mapped != draft_logits.shape[-1]:
        raise ValueError(
            f"the draft head has {draft_logits.shape[-1]} tokens and {num_mapped} are expected; give the vocab_map of that head"
        )


def sparse_forward_kl(
    draft_logits: torch.Tensor, law: TopLaw, weights: torch.Tensor, *, vocab_map: torch.Tensor | None = None
) -> Divergence:
    """Weighted sum of KL between a sparse target law and draft logits [N, Vd], each with its tail as one bucket.

    The bucket makes it a lower bound of the full KL. Kept tokens that the draft vocabulary lacks count as `outside` mass; alpha
    is the part that the kept tokens prove. Gradients are autograd's own.
    """
    wide = draft_logits if draft_logits.dtype == torch.float64 else draft_logits.float()
    logprobs = torch.log_softmax(wide.masked_fill((weights == 0)[:, None], 0.0), dim=-1)
    num_draft_tokens = logprobs.shape[-1]
    columns, known = _sparse_columns(law.ids, vocab_map)
    # One more column, of no mass, takes the tokens that the draft vocabulary lacks.
    columns = torch.where(known, columns, num_draft_tokens)
    padded = torch.nn.functional.pad(logprobs, (0, 1), value=LOG_ZERO)
    log_p, log_q = law.logprobs.to(padded.dtype), padded.gather(-1, columns)
    p, tail = log_p.exp(), law.tail.to(padded.dtype)
    # A masked sum, since 1 - sum of the kept loses all digits when they are nearly everything. When they are the whole draft
    # vocabulary, the target's tail is outside mass or rounding.
    log_q_tail = torch.logsumexp(padded.scatter(-1, columns, LOG_ZERO)[:, :num_draft_tokens], dim=-1)
    kl_tail = torch.where(log_q_tail > LOG_ZERO / 2, tail * (tail.clamp(min=1e-30).log() - log_q_tail), 0.0)
    kl = torch.where(known, p * (log_p.clamp(min=LOG_ZERO) - log_q), 0.0).sum(dim=-1) + kl_tail
    alpha = torch.minimum(p, log_q.exp()).sum(dim=-1).detach()
    outside = torch.where(known, 0.0, p).sum(dim=-1)
    return Divergence((weights * kl).sum(), alpha, None, outside)


def _sparse_columns(ids: torch.Tensor, vocab_map: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Target ids [N, k] -> (draft ids, known), both [N, k]."""
    if vocab_map is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    ordered, order = torch.sort(vocab_map)
    near = torch.searchsorted(ordered, ids).clamp(max=len(ordered) - 1)
    return order[near], ordered[near] == ids
