"""Divergences of a draft from the target from hidden states, in chunks of rows, so that nothing of
size [T, V] is kept.

The gradient needs the logits that the loss needs, so forward computes both in one walk and backward
only scales it (as Liger's fused losses do). The divergences themselves are in `divergence_rows.py`.

Legend: T rows, H draft width, V target vocabulary, Vd draft vocabulary (V without a subset), t rows
of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from draftsmith.kernels.dispatch import autocast_dtype, reads_freely
from draftsmith.kernels.divergence.kind import DivergenceKind
from draftsmith.kernels.divergence.rows import RowInputs, RowTerms, divergence_terms, draft_columns
from draftsmith.kernels.divergence.sparse import check_sparse, sparse_rows
from draftsmith.kernels.sampling.top_tokens import TopProbs

# Draft logits of one chunk on an accelerator. Every chunk reads the draft head twice and its
# gradient once more, so few large ones: 2048 rows of bfloat16 at V = 128,256.
CHUNK_BYTES = 1 << 29
# The gradient of a bfloat16 head is added up in bfloat16 when the chunks are few: each of them then
# rounds once, as the result does anyway, and the buffer is half as large. More chunks, or any other
# head, add up in float32.
FEW_CHUNKS = 16
# A block of the head's gradient while it is added up in more digits than the product has.
PRODUCT_ELEMENTS = 1 << 26
CPU_PRODUCT_ELEMENTS = 1 << 22
# On a CPU: rows enough to pay for reading the draft head.
CPU_CHUNK_ELEMENTS, CPU_CHUNK_ROWS = 1 << 20, 256


class SharedLogits(NamedTuple):
    """Target logits of neighbouring rows, some of which share theirs."""

    logits: torch.Tensor  # [d, V]
    which: torch.Tensor  # [t] int64, ascending, none of the d left out
    # `logits` are [d, Vd + 1]: the draft vocabulary's in its order, and that of all others together
    is_narrow: bool = False


# Raw target logits of a slice of rows, [t, V] where none are shared.
TargetLogits = Callable[[slice], "torch.Tensor | SharedLogits"]
ChunkRows = Callable[[torch.Tensor, slice], RowTerms]  # (draft logits [t, Vd], which rows) -> terms


class Divergence(NamedTuple):
    """Only `loss` has a gradient."""

    loss: torch.Tensor  # scalar, sum_t weights_t rows_t; see `divergence_weights` for means
    rows: torch.Tensor  # [T] divergence of each row, 0 where the weight is 0
    alpha: torch.Tensor  # [T] sum_v min(p_v, q_v) over the full vocabulary
    # [T] min(1, q(x) / p(x)) at the given tokens; 0 outside the draft vocabulary
    keep: torch.Tensor | None
    # [T] target mass outside the draft vocabulary: alpha is at most 1 minus it
    outside: torch.Tensor


def divergence(
    kind: DivergenceKind,
    draft_hidden: torch.Tensor,
    draft_head: torch.Tensor,
    target: TargetLogits | TopProbs,
    weights: torch.Tensor,
    *,
    vocab_map: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    impl: str = "auto",
    chunk_size: int | None = None,
) -> Divergence:
    """Weighted sum of a divergence over rows, with exact gradients to `draft_hidden` and
    `draft_head`.

    Args:
        kind: `divergence_kind.kind_of("forward-kl")` and so on.
        draft_hidden: [T, H].
        draft_head: [Vd, H]; logits are `draft_hidden @ draft_head.T`. When it needs a gradient, one
        [Vd, H] buffer a call is
            held until backward.
        target: gives the target's raw logits [t, V] of a slice of rows, called without gradients,
        once a slice
            `SharedLogits` where rows share them; or the sparse distribution of every row.
        weights: [T], constant; a row of weight 0 adds exactly nothing to loss and gradients.
        vocab_map: [Vd] target id of each draft id; None when the vocabularies are the same.
        tokens: [T] target ids of the text, for `keep` and for ce.
        impl: "auto", "triton" or "torch", for the row-wise part; all of a sparse distribution
        is torch's. "auto" on a CPU is a compiled kernel where there is one.
        chunk_size: rows a chunk; by default what suits the device.

    Under autocast the products run in its type. Backward runs once.
    """
    dtype = _product_dtype(draft_hidden)
    weights = weights.detach().to(torch.float64 if dtype == torch.float64 else torch.float32)
    if isinstance(target, TopProbs):
        check_sparse(kind, target, vocab_map, len(draft_hidden), len(draft_head))
        rows, tokens = _from_distribution(kind, target, weights, vocab_map), None
    else:
        columns = None if tokens is None else draft_columns(tokens, vocab_map)
        rows = _from_logits(kind, target, weights, vocab_map, columns, impl)
    chunk_size = chunk_size or default_chunk_size(draft_hidden.device, len(draft_head), dtype)
    job = _Job(rows, weights, dtype, chunk_size, tokens is not None)
    return Divergence(*_Fused.apply(draft_hidden, draft_head, job))


def default_chunk_size(
    device: torch.device, vocab_size: int, dtype: torch.dtype = torch.float32
) -> int:
    if reads_freely(device):
        return max(CPU_CHUNK_ROWS, CPU_CHUNK_ELEMENTS // vocab_size)
    rows = CHUNK_BYTES // (vocab_size * dtype.itemsize)
    return max(1, rows // 128 * 128 if rows > 128 else rows)


def _product_dtype(hidden: torch.Tensor) -> torch.dtype:
    if hidden.dtype != torch.float64 and (narrow := autocast_dtype(hidden.device)) is not None:
        return narrow
    return hidden.dtype


def _from_logits(
    kind: DivergenceKind,
    target: TargetLogits,
    weights: torch.Tensor,
    vocab_map: torch.Tensor | None,
    columns: torch.Tensor | None,
    impl: str,
) -> ChunkRows:
    def rows(draft_logits: torch.Tensor, part: slice) -> RowTerms:
        found = target(part)
        logits, which, is_narrow = (
            found if isinstance(found, SharedLogits) else (found, None, False)
        )
        own = torch.arange(draft_logits.shape[-1], device=draft_logits.device)
        ids = own if is_narrow else vocab_map
        _check_sizes(draft_logits, logits, which, ids)
        of_part = None if columns is None else columns[part]
        given = RowInputs(draft_logits, logits.detach(), weights[part], ids, of_part, which)
        return divergence_terms(kind, given, impl=impl)

    return rows


def _from_distribution(
    kind: DivergenceKind,
    distribution: TopProbs,
    weights: torch.Tensor,
    vocab_map: torch.Tensor | None,
) -> ChunkRows:
    def rows(draft_logits: torch.Tensor, part: slice) -> RowTerms:
        return sparse_rows(
            kind,
            draft_logits,
            TopProbs(*(values[part] for values in distribution)),
            weights[part],
            vocab_map,
        )

    return rows


class _Job(NamedTuple):
    """Arguments of one call besides hidden states and head."""

    rows: ChunkRows
    weights: torch.Tensor  # [T]
    dtype: torch.dtype  # of the products
    chunk_size: int
    has_keep: bool


class _Gradients(NamedTuple):
    """Filled chunk by chunk; None where none is needed."""

    hidden: torch.Tensor | None  # [T, H]
    head: torch.Tensor | None  # [Vd, H]


def _walk(hidden: torch.Tensor, head: torch.Tensor, job: _Job, gradients: _Gradients) -> Divergence:
    """Values and gradients in one walk over the chunks."""
    head = head.to(job.dtype)
    chunks = [
        _chunk(hidden, head, job, gradients, slice(begin, min(begin + job.chunk_size, len(hidden))))
        for begin in range(0, len(hidden), job.chunk_size)
    ]
    nothing = job.weights.new_zeros(0)
    rows, alpha, keep, outside = (
        ([nothing, *values] for values in zip(*chunks)) if chunks else ([nothing] for _ in range(4))
    )
    losses = torch.cat(rows)
    return Divergence(
        (losses * job.weights).sum(),
        losses,
        torch.cat(alpha),
        torch.cat(keep) if job.has_keep else None,
        torch.cat(outside),
    )


def _chunk(
    hidden: torch.Tensor, head: torch.Tensor, job: _Job, gradients: _Gradients, part: slice
) -> tuple:
    """(loss, alpha, keep, outside) of the rows of one chunk; its logits are gone when
    it returns."""
    states = hidden[part].to(job.dtype)
    terms = job.rows(states @ head.T, part)
    if gradients.hidden is not None:
        gradients.hidden[part] = terms.grad @ head
    if gradients.head is not None:
        # 0 * NaN is NaN: the hidden state of a row without weight must not reach the product
        # either.
        _add_product(
            gradients.head, terms.grad, torch.where((job.weights[part] != 0)[:, None], states, 0.0)
        )
    return terms.loss, terms.alpha, terms.keep, terms.outside


def _sum_dtype(head: torch.Tensor, job: _Job) -> torch.dtype:
    is_short = len(job.weights) <= FEW_CHUNKS * job.chunk_size
    return (
        head.dtype if head.dtype == job.dtype == torch.bfloat16 and is_short else job.weights.dtype
    )


def _add_product(total: torch.Tensor, grad: torch.Tensor, states: torch.Tensor) -> None:
    """total [Vd, H] += grad [t, Vd].T @ states [t, H]."""
    if total.dtype == states.dtype:
        total.addmm_(grad.T, states)
        return
    on_cpu = reads_freely(states.device)
    elements = min(PRODUCT_ELEMENTS, CPU_PRODUCT_ELEMENTS) if on_cpu else PRODUCT_ELEMENTS
    step = max(1, elements // states.shape[-1])
    for begin in range(0, len(total), step):
        total[begin : begin + step] += grad[:, begin : begin + step].T @ states


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, draft_hidden, draft_head, job):
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        gradients = _Gradients(
            torch.zeros_like(draft_hidden) if wants_hidden else None,
            torch.zeros_like(draft_head, dtype=_sum_dtype(draft_head, job)) if wants_head else None,
        )
        terms = _walk(draft_hidden.detach(), draft_head.detach(), job, gradients)
        ctx.grads = (
            gradients.hidden,
            None if gradients.head is None else gradients.head.to(draft_head.dtype),
        )
        ctx.mark_non_differentiable(*(value for value in terms[1:] if value is not None))
        return tuple(terms)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        if ctx.grads is None:
            raise ValueError(
                "the gradients of this divergence were already used; call divergence again for a "
                "second backward"
            )
        # In place: a second [Vd, H] would be the largest thing of the whole step.
        grads = tuple(None if grad is None else grad.mul_(grad_loss) for grad in ctx.grads)
        ctx.grads = None
        return (*grads, None)


def _check_sizes(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    which: torch.Tensor | None,
    vocab_map: torch.Tensor | None,
) -> None:
    num_rows = len(target_logits if which is None else which)
    if num_rows != len(draft_logits):
        raise ValueError(
            f"target_logits gave {num_rows} rows for a slice of {draft_logits.shape[0]}"
        )
    num_mapped = target_logits.shape[-1] if vocab_map is None else len(vocab_map)
    if num_mapped != draft_logits.shape[-1]:
        raise ValueError(
            f"the draft head has {draft_logits.shape[-1]} tokens and {num_mapped} are expected; "
            "give the vocab_map of that head"
        )
