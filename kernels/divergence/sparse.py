"""Divergences from a sparse target distribution: its kept tokens, and one bucket each for the
target's and the draft's tail.

A divergence of the bucketed distributions is at most that of the full ones, and equal when the
tails are alike in shape; so is its gradient, which within the tail pulls all of the draft's tokens
alike. Kept tokens that the draft vocabulary lacks are `outside`.

Legend: t rows, k kept tokens, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftsmith.kernels.divergence.kind import DivergenceKind
from draftsmith.kernels.divergence.rows import (
    DIVERGENCES,
    LOG_ZERO,
    RowDistributions,
    RowTerms,
    draft_columns,
)
from draftsmith.kernels.sampling.top_tokens import TopProbs

# A tail is stored as 1 - sum of the rest in float32, so a smaller one is rounding.
LEAST_TAIL = 2.0**-24
REFUSED = {"ce": "the text's token need not be among the kept ones; give target logits"}


class Buckets(NamedTuple):
    """k kept tokens, then the tail."""

    log_p: torch.Tensor  # [t, k + 1]
    log_q: torch.Tensor  # [t, k + 1], with gradient to the draft logits
    outside: torch.Tensor  # [t]


def check_sparse(
    kind: DivergenceKind,
    distribution: TopProbs,
    vocab_map: torch.Tensor | None,
    num_rows: int,
    num_draft_tokens: int,
) -> None:
    if kind.name in REFUSED:
        raise ValueError(
            f"divergence {kind.name!r} cannot be had from a sparse distribution: "
            f"{REFUSED[kind.name]}"
        )
    if len(distribution.ids) != num_rows:
        raise ValueError(
            f"the sparse distribution has {len(distribution.ids)} rows and there are {num_rows} "
            "draft states; give a distribution for each"
        )
    if vocab_map is not None and len(vocab_map) != num_draft_tokens:
        raise ValueError(
            f"the draft head has {num_draft_tokens} tokens and vocab_map {len(vocab_map)}; give "
            "the map of that head"
        )


def sparse_rows(
    kind: DivergenceKind,
    draft_logits: torch.Tensor,
    distribution: TopProbs,
    weights: torch.Tensor,
    vocab_map: torch.Tensor | None,
) -> RowTerms:
    """`divergence_rows` of bucketed distributions. `alpha` is the part that the kept tokens prove;
    `keep` is not known."""
    counted = weights != 0
    logits = (
        draft_logits.detach().to(weights.dtype).masked_fill(~counted[:, None], 0.0).requires_grad_()
    )
    with torch.enable_grad():
        buckets = _buckets(torch.log_softmax(logits, dim=-1), distribution, vocab_map)
    log_p, log_q = buckets.log_p, buckets.log_q.detach()
    p, q = log_p.exp(), log_q.exp()
    shared = torch.minimum(p, q)
    distributions = RowDistributions(
        log_p.clone(), log_q.clone(), p, q, shared.sum(dim=-1), buckets.outside, None
    )
    push = DIVERGENCES[kind.name](distributions, kind.parameter)
    # dL / d log q of a bucket is -push; autograd carries it on to the logits.
    seed = (-weights[:, None] * push.push).masked_fill(~counted[:, None], 0.0)
    (grad,) = torch.autograd.grad(buckets.log_q, logits, seed)
    loss = torch.where(counted, push.loss, 0.0)
    return RowTerms(
        loss, shared[:, :-1].sum(dim=-1), None, buckets.outside, grad.to(draft_logits.dtype)
    )


def _buckets(
    logprobs: torch.Tensor, distribution: TopProbs, vocab_map: torch.Tensor | None
) -> Buckets:
    num_draft_tokens = logprobs.shape[-1]
    columns = draft_columns(distribution.ids, vocab_map)
    known = columns >= 0
    # One more column, of no mass, takes the tokens that the draft vocabulary lacks.
    columns = torch.where(known, columns, num_draft_tokens)
    padded = torch.nn.functional.pad(logprobs, (0, 1), value=LOG_ZERO)
    kept_p = distribution.logprobs.to(padded.dtype)
    # A masked sum, since 1 - sum of the kept loses all digits when they are nearly everything.
    tail_q = torch.logsumexp(
        padded.scatter(-1, columns, LOG_ZERO)[:, :num_draft_tokens], dim=-1, keepdim=True
    )
    # When the kept tokens are the whole draft vocabulary, the target's tail is outside it, or
    # rounding.
    is_empty = tail_q < LOG_ZERO / 2
    tail = distribution.tail.to(padded.dtype)[:, None]
    tail_p = torch.where(is_empty, LOG_ZERO, tail.clamp(min=LEAST_TAIL).log())
    log_p = torch.cat([torch.where(known, kept_p, LOG_ZERO).clamp(min=LOG_ZERO), tail_p], dim=-1)
    outside = (
        torch.where(known, 0.0, kept_p.exp()).sum(dim=-1) + torch.where(is_empty, tail, 0.0)[:, 0]
    )
    return Buckets(log_p, torch.cat([padded.gather(-1, columns), tail_q], dim=-1), outside)
