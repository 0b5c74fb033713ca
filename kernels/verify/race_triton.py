"""The race for the token of a request's deciding row, in Triton: logits minus log E, by bounds
where they decide.

A rule decides once a request and writes down what it draws from (`settle`); `race` leaves the
winner of every block, and its last program of a request writes the winner of these.

Legend as in `rows_triton.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device
from draftsmith.kernels.sampling.filters_triton import MINUS_INF, clean
from draftsmith.kernels.sampling.random_streams_triton import log_noise, noise_uniform
from draftsmith.kernels.verify.rows_triton import (
    NUM_CHOICES,
    NUM_SCALES,
    VerifyRows,
    finite,
    log_residual,
    logprob,
    target_logits,
    temperature_of,
)

_TILE = 512  # tokens of a step of a race
# -log E lies between -3 and 37: what is so far below another logit never wins.
MOST_GAP = tl.constexpr(40.0)
# The log of it is ten times what rounding, which is less than 1e-4, does to scores in that range.
SLACK = tl.constexpr(1 + 2.0**-10)


@triton.jit
def settle(
    choices,  # [B, NUM_CHOICES] int64, written
    raced,  # [B] int32, written: blocks that raced
    verdicts,  # [B, K + 2] int64, written: accepted, tokens
    b,
    kept,  # drafted tokens
    tokens,  # [DEPTHS] drafted tokens
    next_token,  # -1 where a race finds it
    p_row,  # row of logits to draw from, -1 for no race
    q_row,  # row of q_logits to subtract, or -1
    q_token,  # the one token of q to subtract, or -1
    key,  # of the race
    residual,  # whether anything is subtracted
    num_draft,  # K
    depths,  # [DEPTHS]
):
    """Writes the outcome of request b but for the token that is still to be drawn, and from what
    that is."""
    row = verdicts + b * (num_draft + 2)
    tl.store(row, kept)
    output = tl.where(depths < kept, tokens, tl.where(depths == kept, next_token, -1))
    tl.store(row + 1 + depths, output.to(tl.int64), mask=depths <= num_draft)
    tl.store(raced + b, 0)
    choices += b * NUM_CHOICES
    tl.store(choices, p_row)
    tl.store(choices + 1, q_row)
    tl.store(choices + 2, q_token)
    tl.store(choices + 3, key)
    tl.store(choices + 4, kept)
    tl.store(choices + 5, residual)


@triton.jit
def drawn_from(
    logits,
    stride,
    cuts,
    p_row,
    temperature,
    minus,  # pointer to q [V], whether it is read, a token of log q 0, p_top, p_log_sum, q_top, ...
    residual,
    columns,
    inside,
):
    """Logits to draw from: p, or log max(r p - q, 0)."""
    x = target_logits(logits, stride, cuts, p_row, columns, inside, temperature)
    if residual:
        q, has_q, q_token, p_top, p_log_sum, q_top, q_log_sum, reach = minus
        log_q = clean(tl.load(q + columns, mask=inside & has_q, other=MINUS_INF))
        log_q = tl.where(columns == q_token, 0.0, logprob(log_q, q_top, q_log_sum))
        x = log_residual(logprob(x, p_top, p_log_sum) + reach, log_q)
    return x


@triton.jit
def advance(leaders, logits, columns, key, reference):
    """`leaders` [TILE] of a race, see `lead`, after more tokens: largest logit, lowest bound of a
    time, that token and its logit, lowest bound of another's time."""
    tops, firsts, tokens, owns, seconds = leaders
    u = noise_uniform(key, columns)
    # E is at least u + u^2 / 2 + u^3 / 3.
    bounds = u * (1.0 + u * (0.5 + u * 0.33333334)) * tl.exp(reference - logits)
    ahead = bounds < firsts
    seconds = tl.minimum(seconds, tl.maximum(firsts, bounds))
    tokens, owns = tl.where(ahead, columns, tokens), tl.where(ahead, logits, owns)
    return tl.maximum(tops, logits), tl.minimum(firsts, bounds), tokens, owns, seconds


@triton.jit
def lead(leaders, lanes, key, reference, SLACK: tl.constexpr = SLACK):
    """(largest logit, winner of a race, its score below that logit, whether another token might
    have won) from bounds of times, which are relative to `reference`, at least the largest logit.

    Only the token with the lowest bound is given its logarithms.
    """
    tops, firsts, tokens, owns, seconds = leaders
    top = tl.max(tops, axis=0)
    _, lane = tl.min(firsts, axis=0, return_indices=True)
    token = tl.max(tl.where(lanes == lane, tokens, 0), axis=0)
    own = tl.max(tl.where(lanes == lane, owns, MINUS_INF), axis=0)
    second = tl.min(tl.where(lanes == lane, seconds, firsts), axis=0)
    best = (own - finite(top)) - log_noise(key, token)
    # What is so far below the reference overflows.
    gap = reference - top
    contested = (second < tl.exp(gap - best) * SLACK) | (gap > MOST_GAP)
    return top, token, best, contested & (top > MINUS_INF)


@triton.jit
def exact_race(
    logits, stride, cuts, p_row, temperature, minus, residual,
    top,  # the largest logit
    key, begin, end,
    TILE: tl.constexpr,
):  # fmt: skip
    """(best score below `top`, its token) of the columns `begin` .. `end` - 1, of `drawn_from`."""
    bests = tl.full([TILE], float("-inf"), tl.float32)
    tokens = tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        columns = start + tl.arange(0, TILE)
        x = drawn_from(
            logits, stride, cuts, p_row, temperature, minus, residual, columns, columns < end
        )
        scores = (x - top) - log_noise(key, columns)
        tokens = tl.where(scores > bests, columns, tokens)
        bests = tl.maximum(bests, scores)
    best = tl.max(bests, axis=0)
    return best, tl.min(tl.where(bests == best, tokens, 0x7FFFFFFF), axis=0)


@triton.jit(
    do_not_specialize=["num_draft"], do_not_specialize_on_alignment=["temperatures", "cuts"]
)
def race(
    logits,  # [R, V]
    stride,  # of a row of logits
    temperatures,  # [B] float32, or None
    cuts,  # as `target_logits` takes them
    q_logits,  # [D * K, V] processed
    q_stride,  # of a row of q_logits
    maxima,  # [2 (p, q), B, K + 1, blocks] float32
    choices,  # [B, NUM_CHOICES] int64
    scales,  # [B, NUM_SCALES] float32
    raced,  # [B] int32, written
    verdicts,  # [B, K + 2] int64, written
    scores,  # [B, blocks] float64, written
    winners,  # [B, blocks] int32, written
    num_draft,  # K
    num_tokens,  # V
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (b, block): the token of the block with the largest logit - log E, by bounds where
    they decide. The last one of a request finds the winner of its blocks."""
    b, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    choices += b * NUM_CHOICES
    scales += b * NUM_SCALES
    p_row, q_row, q_token = tl.load(choices), tl.load(choices + 1), tl.load(choices + 2)
    key, kept, residual = tl.load(choices + 3), tl.load(choices + 4), tl.load(choices + 5) != 0
    if p_row < 0:
        return
    p_top, p_log_sum, reach = tl.load(scales), tl.load(scales + 1), tl.load(scales + 4)
    q, has_q = q_logits + q_row * q_stride, q_row >= 0
    q_top, q_log_sum = tl.load(scales + 2), tl.load(scales + 3)
    minus = q, has_q, q_token, p_top, p_log_sum, q_top, q_log_sum, reach
    temperature = temperature_of(temperatures, b)
    maxima += (b * (num_draft + 1) + kept) * num_blocks
    highest = tl.load(maxima + block)
    reference = highest
    if residual:
        reference = logprob(highest, p_top, p_log_sum) + reach
    score, token = tl.full((), float("-inf"), tl.float64), tl.full((), -1, tl.int32)
    lanes = tl.arange(0, TILE)
    begin, end = block * BLOCK, tl.minimum((block + 1) * BLOCK, num_tokens)
    # No token of a block this far below the likeliest one of p comes before that.
    if (highest > MINUS_INF) & (residual | (highest >= p_top - MOST_GAP)):
        nothing = tl.full([TILE], float("-inf"), tl.float32)
        leaders = nothing, -nothing, lanes, nothing, -nothing
        for start in range(begin, end, TILE):
            columns = start + lanes
            x = drawn_from(
                logits, stride, cuts, p_row, temperature, minus, residual, columns, columns < end
            )
            leaders = advance(leaders, x, columns, key, reference)
        top, token, best, contested = lead(leaders, lanes, key, reference)
        if contested:
            best, token = exact_race(
                logits, stride, cuts, p_row, temperature, minus, residual, top, key, begin, end,
                TILE,
            )  # fmt: skip
        # Formed below the block's maximum, so that large logits do not round the noise away.
        score = best.to(tl.float64) + finite(top).to(tl.float64)
    tl.store(scores + b * num_blocks + block, score)
    tl.store(winners + b * num_blocks + block, token)
    tl.debug_barrier()  # all of the program's writes come before its count
    if tl.atomic_add(raced + b, 1, sem="acq_rel") == num_blocks - 1:
        blocks = tl.arange(0, BLOCKS)
        inside = blocks < num_blocks
        places = b * num_blocks + blocks
        values = tl.load(scores + places, mask=inside, other=MINUS_INF)
        score, at = tl.max(values, axis=0, return_indices=True)
        token = tl.load(winners + b * num_blocks + at)
        if score == MINUS_INF:
            # Rounding left nothing of a residual, or the row has no mass.
            token = tl.full((), -1, tl.int32)
            for other in range(num_blocks):
                top = finite(tl.load(maxima + other))
                begin, end = other * BLOCK, tl.minimum((other + 1) * BLOCK, num_tokens)
                best, own = exact_race(
                    logits, stride, cuts, p_row, temperature, minus, False, top, key, begin, end,
                    TILE,
                )  # fmt: skip
                ahead = best.to(tl.float64) + top.to(tl.float64) > score
                token = tl.where(ahead, own, token)
                score = tl.maximum(best.to(tl.float64) + top.to(tl.float64), score)
        tl.store(verdicts + b * (num_draft + 2) + 1 + kept, token.to(tl.int64))


@on_its_device
def race_rows(rows: VerifyRows) -> None:
    places = rows.num_requests, rows.num_blocks
    race[places](
        *rows.distributions,
        rows.stats[0],
        *rows.decision,
        torch.empty(places, dtype=torch.float64, device=rows.logits.device),
        torch.empty(places, dtype=torch.int32, device=rows.logits.device),
        rows.tokens.shape[1],
        rows.logits.shape[-1],
        rows.num_blocks,
        BLOCK=rows.block,
        BLOCKS=triton.next_power_of_2(rows.num_blocks),
        TILE=min(_TILE, rows.block),
        num_warps=4,
        maxnreg=64,
    )
