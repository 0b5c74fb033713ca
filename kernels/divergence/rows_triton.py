"""Divergences of rows in Triton: one program per row, two or three walks over its logits, the
gradient written over the draft's.

The first walk gathers the normalisers (online softmax: a running maximum and a sum that is rescaled
when it moves), the second the sums, the third writes the gradient. Sums that are linear in p and
log q (`IN_ONE_WALK`) are the first walk's too, and alpha the last one's. For every divergence of
`divergence_rows.py` the gradient is q_v * total - push_v with

    push_v = a p_v + b q_v [q_v < p_v] + c q_v (log ref_v - log q_v) + d [v = x],   total its sum,

a, b, c, d known once the sums are: the table of a divergence is `_finish`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device, side_by_side
from draftsmith.kernels.divergence.kind import DivergenceKind
from draftsmith.kernels.divergence.rows import (
    LEAST_ALPHA,
    LEAST_DEVIATION,
    LEAST_LOG_P,
    LOG_ZERO,
    RowInputs,
    RowTerms,
)

BLOCK = 4096
CODES = {
    "forward-kl": 0, "reverse-kl": 1, "jsd": 2, "tv": 3, "tvd++": 4, "lk-alpha": 5, "lk-hybrid": 6,
    "ce": 7,
}  # fmt: skip
HELD_AGAINST = ("reverse-kl", "jsd")  # those whose c is not 0
IN_ONE_WALK = ("forward-kl", "ce")  # those whose loss and a, b, c, d follow from such sums
_FORWARD_KL, _REVERSE_KL, _JSD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_TVD, _LK_ALPHA, _LK_HYBRID, _CE = (
    tl.constexpr(4),
    tl.constexpr(5),
    tl.constexpr(6),
    tl.constexpr(7),
)
_MINUS_INF = tl.constexpr(float("-inf"))
_LOG_ZERO = tl.constexpr(LOG_ZERO)
_LEAST_LOG_P = tl.constexpr(LEAST_LOG_P)
_LEAST_ALPHA = tl.constexpr(LEAST_ALPHA)
_LEAST_DEVIATION = tl.constexpr(LEAST_DEVIATION)


@triton.jit
def _finite(top):
    return tl.where(top == _MINUS_INF, 0.0, top)


@triton.jit
def _online(x, top, total):
    """Takes a block of logits into the running (maximum, sum of exponentials)."""
    new_top = tl.maximum(top, tl.max(x, axis=0))
    shift = _finite(new_top)
    return new_top, total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), axis=0)


@triton.jit
def _normaliser(row, size, lanes, BLOCK: tl.constexpr):
    """(maximum, sum of exponentials below it) of a row."""
    top, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for begin in range(0, size, BLOCK):
        at = begin + lanes
        x = tl.load(row + at, mask=at < size, other=_MINUS_INF).to(tl.float32)
        top, total = _online(x, top, total)
    return top, total


@triton.jit
def _logits(draft, target, vocab_map, at, size):
    """(x, z) of a block of draft tokens: the target's and the draft's."""
    inside = at < size
    ids = at
    if vocab_map is not None:
        ids = tl.load(vocab_map + at, mask=inside, other=0)
    z = tl.load(draft + at, mask=inside, other=_MINUS_INF).to(tl.float32)
    return tl.load(target + ids, mask=inside, other=_MINUS_INF).to(tl.float32), z


@triton.jit
def _sums_in_one_walk(
    draft, target, vocab_map, num_draft_tokens, num_target_tokens, lanes,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(log normaliser of p, of q, sum p, sum p (log p - log q)), the sums over draft tokens.

    Logits are held against the maxima so far, so that no large numbers cancel in a sum: it moves by
    what the maxima move by."""
    p_top, p_total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    if vocab_map is not None:
        p_top, p_total = _normaliser(target, num_target_tokens, lanes, BLOCK)
    q_top, q_total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    mass, against = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for begin in range(0, num_draft_tokens, BLOCK):
        x, z = _logits(draft, target, vocab_map, begin + lanes, num_draft_tokens)
        p_before, q_before = p_top, _finite(q_top)
        p_top = tl.maximum(p_top, tl.max(x, axis=0))
        q_top, q_total = _online(z, q_top, q_total)
        p_shift, q_shift = _finite(p_top), _finite(q_top)
        x, z, decay = x - p_shift, z - q_shift, tl.exp(p_before - p_shift)
        p = tl.exp(x)
        if KIND == _FORWARD_KL:
            moved = (q_shift - q_before) - (p_shift - _finite(p_before))
            terms = p * (tl.maximum(x, _LOG_ZERO) - tl.maximum(z, _LOG_ZERO))
            against = (against + mass * moved) * decay + tl.sum(terms, axis=0)
        mass = mass * decay + tl.sum(p, axis=0)
    if vocab_map is None:
        p_total = mass
    log_p_total, log_q_total = tl.log(p_total), tl.log(q_total)
    against = (against + mass * (log_q_total - log_p_total)) / p_total
    return p_top + log_p_total, q_top + log_q_total, mass / p_total, against


@triton.jit
def _log_distributions(draft, target, vocab_map, at, size, log_norm_p, log_norm_q):
    """(log p, log q) of a block of draft tokens."""
    x, z = _logits(draft, target, vocab_map, at, size)
    return tl.maximum(x - log_norm_p, _LOG_ZERO), tl.maximum(z - log_norm_q, _LOG_ZERO)


@triton.jit
def _reference(log_p, p, q, parameter, KIND: tl.constexpr):
    """log ref_v, what log q_v is held against where c is not 0."""
    log_ref = log_p
    if KIND == _REVERSE_KL:
        log_ref = tl.maximum(log_p, _LEAST_LOG_P)
    if KIND == _JSD:
        log_ref = tl.maximum(tl.log(parameter * p + (1 - parameter) * q), _LOG_ZERO)
    return log_ref


@triton.jit
def _root(x):
    return tl.sqrt(tl.minimum(tl.maximum(x, 0.0), 1.0))


@triton.jit
def _arc_sine(x):
    """Arc sine of 0 <= x <= 1: a polynomial on [0, 1/2] (fitted, off by 5e-9), the half-angle
    formula above."""
    small = x <= 0.5
    y = tl.where(small, x, tl.sqrt((1 - x) * 0.5))
    s = y * y
    tail = (
        (((0.04214736 * s + 0.02418865) * s + 0.04546919) * s + 0.07495298) * s + 0.16666753
    ) * s
    arc = y + y * tail
    return tl.where(small, arc, 1.5707963267948966 - 2 * arc)


@triton.jit
def _finish(mass, outside, alpha, below, above, against, log_q_x, parameter, KIND: tl.constexpr):
    """The sums of a row -> (loss, a, b, c, d)."""
    a, b, c, d = 0.0 * mass, 0.0 * mass, 0.0 * mass, 0.0 * mass
    loss = tl.maximum(1 - alpha, 0.0)
    if KIND == _FORWARD_KL:
        loss = against
        a = a + 1
    elif KIND == _REVERSE_KL:
        loss = -against
        c = c + 1
    elif KIND == _JSD:
        # `above` is sum p (log p - log m) here.
        loss = parameter * (above - outside * tl.log(parameter)) - (1 - parameter) * against
        c = c + (1 - parameter)
    elif KIND == _TVD:
        q_mass, p_mass = tl.minimum(below, 1.0), tl.minimum(above + outside, 1.0)
        b = 1 / tl.maximum(tl.sqrt(q_mass * (1 - q_mass)), _LEAST_DEVIATION)
        loss = 2 * (_arc_sine(_root(p_mass)) - _arc_sine(_root(q_mass)))
    elif KIND == _LK_ALPHA:
        loss = -tl.log(tl.maximum(alpha, _LEAST_ALPHA))
        b = 1 / tl.maximum(alpha, _LEAST_ALPHA)
    elif KIND == _LK_HYBRID:
        a = tl.exp(-parameter * alpha)
        b = 1 - a
        loss = a * against + b * loss
    elif KIND == _CE:
        loss = -log_q_x
        d = d + 1
    else:
        b = b + 1
    return loss, a, b, c, d


@triton.jit
def _divergence_rows(
    draft_logits,  # [N, Vd], overwritten by the gradient
    draft_stride,  # of a row of draft_logits
    target_logits,  # [N, V]
    target_stride,  # of a row of target_logits
    weights,  # [N] float32
    vocab_map,  # [Vd] int64, or None
    columns,  # [N] int64, or None
    losses,  # [N] float32, written
    alphas,  # [N] float32, written
    keeps,  # [N] float32, written
    outsides,  # [N] float32, written
    parameter,  # scalar
    num_draft_tokens,  # Vd
    num_target_tokens,  # V
    KIND: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_SUMS: tl.constexpr,  # a walk for the sums alone
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    draft, target = draft_logits + row * draft_stride, target_logits + row * target_stride
    lanes = tl.arange(0, BLOCK)
    weight = tl.load(weights + row)
    mass, alpha = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    below, above, against = (
        tl.full((), 0.0, tl.float32),
        tl.full((), 0.0, tl.float32),
        tl.full((), 0.0, tl.float32),
    )
    if HAS_SUMS:
        p_top, p_total = _normaliser(target, num_target_tokens, lanes, BLOCK)
        q_top, q_total = _normaliser(draft, num_draft_tokens, lanes, BLOCK)
        log_norm_p, log_norm_q = p_top + tl.log(p_total), q_top + tl.log(q_total)
        for begin in range(0, num_draft_tokens, BLOCK):
            at = begin + lanes
            log_p, log_q = _log_distributions(
                draft, target, vocab_map, at, num_draft_tokens, log_norm_p, log_norm_q
            )
            p, q = tl.exp(log_p), tl.exp(log_q)
            mass += tl.sum(p, axis=0)
            alpha += tl.sum(tl.minimum(p, q), axis=0)
            below += tl.sum(tl.where(q < p, q, 0.0), axis=0)
            log_ref = _reference(log_p, p, q, parameter, KIND)
            if KIND == _JSD:
                above += tl.sum(p * (log_p - log_ref), axis=0)
            else:
                above += tl.sum(tl.where(q < p, p, 0.0), axis=0)
            if HAS_REF:
                against += tl.sum(q * (log_ref - log_q), axis=0)
            else:
                against += tl.sum(p * (log_p - log_q), axis=0)
    else:
        log_norm_p, log_norm_q, mass, against = _sums_in_one_walk(
            draft, target, vocab_map, num_draft_tokens, num_target_tokens, lanes,
            KIND, BLOCK,
        )  # fmt: skip
    outside = tl.full((), 0.0, tl.float32)
    if vocab_map is not None:
        outside = tl.maximum(1.0 - mass, 0.0)

    # The text's token is read before the gradient goes over the logits.
    column, log_q_x = tl.full((), -1, tl.int64), tl.full((), 0.0, tl.float32)
    if columns is not None:
        column = tl.load(columns + row)
        token = tl.maximum(column, 0)
        z = tl.load(draft + token).to(tl.float32)
        if vocab_map is not None:
            token = tl.load(vocab_map + token)
        x = tl.load(target + token).to(tl.float32)
        log_q_x = tl.where(column >= 0, tl.maximum(z - log_norm_q, _LOG_ZERO), 0.0)
        ratio = tl.exp(tl.minimum(log_q_x - tl.maximum(x - log_norm_p, _LOG_ZERO), 0.0))
        tl.store(keeps + row, tl.where(column >= 0, ratio, 0.0))

    loss, a, b, c, d = _finish(
        mass, outside, alpha, below, above, against, log_q_x, parameter, KIND
    )
    total = a * mass + b * below + d * tl.where(column >= 0, 1.0, 0.0)
    if HAS_REF:
        total += c * against
    # Every lane reads its logits before it writes them, and no other lane reads those.
    for begin in range(0, num_draft_tokens, BLOCK):
        at = begin + lanes
        log_p, log_q = _log_distributions(
            draft, target, vocab_map, at, num_draft_tokens, log_norm_p, log_norm_q
        )
        p, q = tl.exp(log_p), tl.exp(log_q)
        push = a * p + b * tl.where(q < p, q, 0.0) + d * tl.where(at == column, 1.0, 0.0)
        if HAS_REF:
            push += c * q * (_reference(log_p, p, q, parameter, KIND) - log_q)
        slope = tl.where(weight != 0, weight * (q * total - push), 0.0)
        tl.store(draft + at, slope, mask=at < num_draft_tokens)
        if not HAS_SUMS:
            alpha += tl.sum(tl.minimum(p, q), axis=0)

    tl.store(losses + row, tl.where(weight != 0, loss, 0.0))
    tl.store(alphas + row, alpha)
    tl.store(outsides + row, outside)


@on_its_device
def divergence_rows_triton(
    kind: DivergenceKind, rows: RowInputs, *, block: int = BLOCK
) -> RowTerms:
    """`divergence_rows` in float32; `block` tokens of the vocabulary per step. The gradient lies
    over the draft logits."""
    if kind.name == "ce" and rows.columns is None:
        raise ValueError("divergence 'ce' needs the tokens of the text; give tokens")
    if rows.which is not None:
        rows = rows.part(slice(None))
    grad, target_logits = side_by_side(rows.draft_logits), side_by_side(rows.target_logits)
    num_rows, num_draft_tokens = grad.shape
    weights = rows.weights.float().contiguous()
    loss, alpha, keep, outside = (
        torch.empty(num_rows, dtype=torch.float32, device=weights.device) for _ in range(4)
    )
    if num_rows:
        _divergence_rows[(num_rows,)](
            grad,
            grad.stride(0),
            target_logits,
            target_logits.stride(0),
            weights,
            None if rows.vocab_map is None else rows.vocab_map.contiguous(),
            None if rows.columns is None else rows.columns.contiguous(),
            loss,
            alpha,
            keep,
            outside,
            float(kind.parameter),
            num_draft_tokens,
            target_logits.shape[-1],
            KIND=CODES[kind.name],
            HAS_REF=kind.name in HELD_AGAINST,
            HAS_SUMS=kind.name not in IN_ONE_WALK,
            BLOCK=min(
                block, triton.next_power_of_2(max(num_draft_tokens, target_logits.shape[-1]))
            ),
            num_warps=8,
        )
    return RowTerms(loss, alpha, None if rows.columns is None else keep, outside, grad)
