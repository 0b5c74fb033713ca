"""The divergences of rows of logits with their gradients in closed form: the reference of the
Triton kernel, and what a CPU runs.

Target distribution p, normalised over the full target vocabulary; draft distribution q = softmax(z)
over the draft vocabulary S. With push_v = -q_v dL/dq_v, minus the slope of L in log q_v,
the gradient of any L is dL/dz_v = q_v sum_u push_u - push_v. A = {v in S: q_v < p_v}; o = the
target's mass outside S.

    name        L                                                  push_v              what o adds
    forward-kl  sum_S p log(p/q)                                   p_v                 nothing (its
    own term is infinite)
    reverse-kl  sum_S q log(q/p)                                   -q_v log(q_v/p_v)   nothing (q is
    0 there)
    jsd         b KL(p || m) + (1-b) KL(q || m), m = b p + (1-b) q -(1-b) q_v log(q_v/m_v)  -b o log
    b
    tv          1 - alpha, alpha = sum_S min(p, q)                 q_v [v in A]        o, inside 1 -
    alpha
    tvd++       2 asin sqrt P(A) - 2 asin sqrt q(A)                q_v [v in A] / s    o, inside
    P(A) = p(A) + o
    lk-alpha    -log alpha                                         q_v [v in A] / alpha  its part of
    -log alpha
    lk-hybrid   h KL + (1-h) TV, h = exp(-decay alpha), constant   h p_v + (1-h) q_v [v in A]  as in
    its parts
    ce          -log q(x), x the token of the text                 [v = x]             a row whose x
    is outside S gives 0

forward-kl and reverse-kl keep p unnormalised on S: the least reverse-kl is -log(1 - o) and not 0.

tvd++ (Goel et al. 2024, arXiv:2403.00858) is the policy gradient of TV, reward r = [v in A] for
draws from q, with the reward less its mean and over its deviation s = sqrt(q(A) (1 - q(A))). The
expectation over q is summed here and not sampled, so the mean drops out and the deviation is each
row's own. While A stays the same, that is the gradient of the arc in the table: its value. So it is
what the sampled estimator of one row tends to (tested). A deviation taken over many rows would
scale all of them alike, which is plain TV at another learning rate; each row's own is where the two
differ. On-policy text changes which rows there are. lk-alpha and lk-hybrid are from
arXiv:2602.23881, here with every row's own alpha.

Legend: t rows of a chunk, V target vocabulary, Vd draft vocabulary (V without a subset).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.kernels.dispatch import operation, reads_freely
from draftsmith.kernels.divergence.kind import DivergenceKind
from draftsmith.kernels.host_compiler import address_of, function_of

LOG_ZERO = -1e30  # stands in for log 0 where it meets a zero weight; 0 * -inf would be NaN
# reverse KL: a token that the target rules out costs a hundred nats, not infinitely many
LEAST_LOG_P = -100.0
LEAST_ALPHA = 1e-30  # distributions that share nothing
# Logits a block on a CPU: every one of a dozen passes finds them in its cache, which is more than
# twice as fast.
CPU_BLOCK_ELEMENTS = 1 << 16
LEAST_DEVIATION = 1e-4  # of tvd++'s reward, lest rounding be blown up


class RowInputs(NamedTuple):
    draft_logits: torch.Tensor  # [t, Vd] raw; the gradient may be written over them
    target_logits: torch.Tensor  # [d, V] raw
    weights: torch.Tensor  # [t]; the reference computes in their dtype
    vocab_map: torch.Tensor | None  # [Vd] target id of each draft id
    # [t] draft ids of the text's tokens, -1 outside the draft vocabulary (`draft_columns`)
    columns: torch.Tensor | None
    # [t] target row of each row, ascending, none of the d left out; None: its own, and d = t
    which: torch.Tensor | None = None

    def part(self, rows: slice) -> RowInputs:
        """These rows, each with a target row of its own."""
        columns = None if self.columns is None else self.columns[rows]
        return RowInputs(
            self.draft_logits[rows],
            self.target_logits[rows if self.which is None else self.which[rows]],
            self.weights[rows],
            self.vocab_map,
            columns,
        )


class RowTerms(NamedTuple):
    """Results of one chunk. A row of weight 0 may hold anything, NaN included; its loss and grad
    are 0 all the same."""

    loss: torch.Tensor  # [t], not weighted
    alpha: torch.Tensor  # [t] sum_v min(p_v, q_v)
    keep: torch.Tensor | None  # [t] min(1, q(x) / p(x)) at the tokens
    outside: torch.Tensor  # [t]
    grad: torch.Tensor  # [t, Vd] weight * dL/dz, in the dtype of the draft logits


class RowDistributions(NamedTuple):
    """Both distributions on the same tokens or buckets. A divergence may overwrite `log_p` and
    `log_q`, and nothing else."""

    log_p: torch.Tensor  # [t, Vd]
    log_q: torch.Tensor  # [t, Vd]
    p: torch.Tensor  # [t, Vd]
    q: torch.Tensor  # [t, Vd]
    alpha: torch.Tensor  # [t]
    outside: torch.Tensor  # [t] target mass elsewhere
    columns: torch.Tensor | None  # [t] place of the text's token, -1 if it has none


class Push(NamedTuple):
    loss: torch.Tensor  # [t]
    push: torch.Tensor  # [t, Vd] -q dL/dq; may be `Distributions.p`
    total: torch.Tensor  # [t] its sum


def _forward_kl(distributions: RowDistributions, parameter: float) -> Push:
    loss = distributions.log_p.sub_(distributions.log_q).mul_(distributions.p).sum(dim=-1)
    return Push(loss, distributions.p, distributions.p.sum(dim=-1))


def _reverse_kl(distributions: RowDistributions, parameter: float) -> Push:
    terms = distributions.log_q.sub_(distributions.log_p.clamp_(min=LEAST_LOG_P)).mul_(
        distributions.q
    )
    loss = terms.sum(dim=-1)
    return Push(loss, terms.neg_(), -loss)


def _jsd(distributions: RowDistributions, beta: float) -> Push:
    log_mixture = (
        (beta * distributions.p).add_(distributions.q, alpha=1 - beta).log_().clamp_(min=LOG_ZERO)
    )
    of_p = distributions.log_p.sub_(log_mixture).mul_(distributions.p).sum(dim=-1)
    terms = distributions.log_q.sub_(log_mixture).mul_(distributions.q).mul_(beta - 1)
    total = terms.sum(dim=-1)
    return Push(beta * (of_p - math.log(beta) * distributions.outside) - total, terms, total)


def _tv(distributions: RowDistributions, parameter: float) -> Push:
    below = _below(distributions)
    return Push((1 - distributions.alpha).clamp(min=0), below, below.sum(dim=-1))


def _tvd_plus_plus(distributions: RowDistributions, parameter: float) -> Push:
    below = _below(distributions)
    q_mass = below.sum(dim=-1).clamp(max=1)
    p_mass = (
        _wanted(distributions).mul_(distributions.p).sum(dim=-1) + distributions.outside
    ).clamp(max=1)
    deviation = (q_mass * (1 - q_mass)).sqrt().clamp(min=LEAST_DEVIATION)
    loss = 2 * (p_mass.sqrt().asin() - q_mass.sqrt().asin())
    return Push(loss, below.div_(deviation[:, None]), q_mass / deviation)


def _lk_alpha(distributions: RowDistributions, parameter: float) -> Push:
    alpha = distributions.alpha.clamp(min=LEAST_ALPHA)
    below = _below(distributions).div_(alpha[:, None])
    return Push(-alpha.log(), below, below.sum(dim=-1))


def _lk_hybrid(distributions: RowDistributions, decay: float) -> Push:
    share = torch.exp(-decay * distributions.alpha)
    kl, tv = _forward_kl(distributions, 0.0), _tv(distributions, 0.0)
    push = tv.push.mul_((1 - share)[:, None]).addcmul_(kl.push, share[:, None])
    return Push(
        share * kl.loss + (1 - share) * tv.loss, push, share * kl.total + (1 - share) * tv.total
    )


def _ce(distributions: RowDistributions, parameter: float) -> Push:
    if distributions.columns is None:
        raise ValueError("divergence 'ce' needs the tokens of the text; give tokens")
    known, at = distributions.columns >= 0, distributions.columns.clamp(min=0)[:, None]
    total = known.to(distributions.q.dtype)
    push = torch.zeros_like(distributions.q).scatter_(-1, at, total[:, None])
    return Push(torch.where(known, -distributions.log_q.gather(-1, at)[:, 0], 0.0), push, total)


def _below(distributions: RowDistributions) -> torch.Tensor:
    """q in A, 0 elsewhere: what every more of would be kept."""
    return _wanted(distributions).mul_(distributions.q)


def _wanted(distributions: RowDistributions) -> torch.Tensor:
    """1 in A, 0 elsewhere. On a CPU `torch.where` is ten times slower when neighbours differ, as
    they do here."""
    return torch.gt(distributions.p, distributions.q, out=torch.empty_like(distributions.q))


DIVERGENCES: dict[str, Callable[[RowDistributions, float], Push]] = {
    "forward-kl": _forward_kl,
    "reverse-kl": _reverse_kl,
    "jsd": _jsd,
    "tv": _tv,
    "tvd++": _tvd_plus_plus,
    "lk-alpha": _lk_alpha,
    "lk-hybrid": _lk_hybrid,
    "ce": _ce,
}


def divergence_rows(kind: DivergenceKind, rows: RowInputs) -> RowTerms:
    """Raw logits -> terms of every row."""
    if rows.which is not None:
        rows = rows.part(slice(None))
    weights, vocab_map = rows.weights, rows.vocab_map
    log_q = torch.log_softmax(rows.draft_logits.to(weights.dtype), dim=-1).clamp_(min=LOG_ZERO)
    # Faster than to find the normaliser alone.
    log_p = torch.log_softmax(rows.target_logits.to(weights.dtype), dim=-1)
    log_p = (log_p if vocab_map is None else log_p[:, vocab_map]).clamp_(min=LOG_ZERO)
    p, q = log_p.exp(), log_q.exp()
    alpha = torch.minimum(p, q).sum(dim=-1)
    outside = torch.zeros_like(alpha) if vocab_map is None else (1 - p.sum(dim=-1)).clamp(min=0)
    keep = None if rows.columns is None else _keep(log_p, log_q, rows.columns)
    push = DIVERGENCES[kind.name](
        RowDistributions(log_p, log_q, p, q, alpha, outside, rows.columns), kind.parameter
    )
    loss, grad = _finish(push, q, weights)
    return RowTerms(loss, alpha, keep, outside, grad.to(rows.draft_logits.dtype))


def _keep(log_p: torch.Tensor, log_q: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    at = columns.clamp(min=0)[:, None]
    ratio = (log_q.gather(-1, at) - log_p.gather(-1, at))[:, 0].clamp(max=0).exp()
    return torch.where(columns >= 0, ratio, 0.0)


def _finish(
    push: Push, q: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss [t], weighted gradient [t, Vd]), both 0 in rows that do not count. Overwrites q."""
    counted = weights != 0
    grad = q.mul_(push.total[:, None]).sub_(push.push).mul_(weights[:, None])
    grad[~counted] = 0.0
    return torch.where(counted, push.loss, 0.0), grad


@operation
def divergence_terms(kind: DivergenceKind, rows: RowInputs, *, impl: str = "auto") -> RowTerms:
    """`divergence_rows`; the gradient may lie over the draft logits. A few rows at a time where
    they are read from a cache."""
    if not reads_freely(rows.draft_logits.device):
        return divergence_rows(kind, rows)
    step = max(1, CPU_BLOCK_ELEMENTS // rows.draft_logits.shape[-1])
    blocks = []
    for begin in range(0, len(rows.weights), step):
        part = rows.part(slice(begin, begin + step))
        terms = divergence_rows(kind, part)
        blocks.append(terms._replace(grad=part.draft_logits.copy_(terms.grad)))
    loss, alpha, kept, outside, _ = zip(*blocks, strict=True)
    keep = None if rows.columns is None else torch.cat(kept)
    return RowTerms(torch.cat(loss), torch.cat(alpha), keep, torch.cat(outside), rows.draft_logits)


def draft_columns(ids: torch.Tensor, vocab_map: torch.Tensor | None) -> torch.Tensor:
    """Target ids -> draft ids of the same shape, -1 for those the draft vocabulary lacks."""
    if vocab_map is None:
        return ids
    ordered, order = torch.sort(vocab_map)
    near = torch.searchsorted(ordered, ids).clamp(max=len(ordered) - 1)
    return torch.where(ordered[near] == ids, order[near], -1)


SOURCE = Path(__file__).with_name("rows_cpu.cpp")
# jsd, whose mixture needs a logarithm of every token, is torch's.
CODES = {
    "forward-kl": 0, "reverse-kl": 1, "tv": 2, "tvd++": 3, "lk-alpha": 4, "lk-hybrid": 5, "ce": 6,
}  # fmt: skip


def _kernel(draft: torch.dtype, target: torch.dtype) -> Any:
    return function_of(SOURCE, "diverge", "ipnpnppppdnnnnppppi", draft, target)


def divergence_rows_compiled(kind: DivergenceKind, rows: RowInputs) -> RowTerms | None:
    """`divergence_rows` in float32 by a compiled kernel: a row of logits is read from a cache, and
    of its size nothing but the gradient is written, over it. None where no kernel computes it:
    another type or layout of logits, jsd, no compiler; sizes or indices that do not fit, which
    torch refuses or reads in its own way."""
    draft, target = rows.draft_logits, rows.target_logits
    if kind.name not in CODES or not _are_readable(rows):
        return None
    kernel = _kernel(draft.dtype, target.dtype)
    if kernel is None or (kind.name == "ce" and rows.columns is None):
        return None
    loss, alpha, keep, outside = torch.empty(4, len(draft), dtype=torch.float32)
    # Held until the kernel has read them.
    weights = rows.weights.contiguous()
    which, vocab_map, columns = (
        None if one is None else one.to(torch.int64).contiguous()
        for one in (rows.which, rows.vocab_map, rows.columns)
    )
    if not _are_in_range(rows, which, vocab_map, columns):
        return None
    kernel(
        CODES[kind.name],
        draft.data_ptr(),
        draft.stride(0),
        target.data_ptr(),
        target.stride(0),
        address_of(which),
        weights.data_ptr(),
        address_of(vocab_map),
        address_of(columns),
        kind.parameter,
        len(draft),
        draft.shape[-1],
        len(target),
        target.shape[-1],
        loss.data_ptr(),
        alpha.data_ptr(),
        None if columns is None else keep.data_ptr(),
        outside.data_ptr(),
        torch.get_num_threads(),
    )
    return RowTerms(loss, alpha, None if columns is None else keep, outside, draft)


def _are_readable(rows: RowInputs) -> bool:
    draft, target, weights, vocab_map, columns, which = rows
    if any(one is not None and not reads_freely(one.device) for one in rows):
        return False
    if draft.ndim != 2 or target.ndim != 2 or weights.dtype != torch.float32:
        return False
    count, num_draft = draft.shape
    return (
        draft.stride(1) == target.stride(1) == 1
        and weights.shape == (count,)
        and (columns is None or columns.shape == (count,))
        and (len(target) == count if which is None else which.shape == (count,))
        and (target.shape[1] == num_draft if vocab_map is None else vocab_map.shape == (num_draft,))
    )


def _are_in_range(
    rows: RowInputs,
    which: torch.Tensor | None,
    vocab_map: torch.Tensor | None,
    columns: torch.Tensor | None,
) -> bool:
    num_distinct, vocab = rows.target_logits.shape
    # Rows of one target row must follow each other.
    return (
        (which is None or (_are_below(which, num_distinct) and bool((which.diff() >= 0).all())))
        and (vocab_map is None or _are_below(vocab_map, vocab))
        # Below 0 the token is outside the draft vocabulary.
        and (columns is None or bool((columns < rows.draft_logits.shape[1]).all()))
    )


def _are_below(indices: torch.Tensor, limit: int) -> bool:
    return bool(((indices >= 0) & (indices < limit)).all())
