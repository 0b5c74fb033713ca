"""Rows of logits as distributions inside Triton kernels, without a buffer of their size: what
verification is made of.

`row_stats` keeps the maximum and the sum of exponentials of every block of a row. The row's
normaliser is a pair, its maximum and the log of the sum relative to it: one float32 for both would
round the small one away where logits are large, which low temperatures make them. A rule decides
once a request and writes down what it draws from (`settle`); `race` leaves the winner of every
block, and its last program of a request writes the winner of these.

Legend: B requests, K draft positions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device
from draftsmith.kernels.sampling.filters_triton import MINUS_INF, clean, is_kept, tempered
from draftsmith.kernels.sampling.random_streams_triton import log_noise, noise_uniform
from draftsmith.kernels.verify.verdict import Drafts

# Positions of a request that kernels are compiled for at least: one variant for every k up to 7,
# and for what the end of an answer leaves of it.
FEWEST_DEPTHS = 8
# Requests whose rows each program adds up by itself: the most, and the fewest that it is compiled
# for.
MOST_SUMMED = 1024
_FEWEST_REQUESTS = 64
# Numbers that a race reads of its request.
NUM_CHOICES, NUM_SCALES = tl.constexpr(6), tl.constexpr(8)
_TILE = 512  # tokens of a step of a race
# -log E lies between -3 and 37: what is so far below another logit never wins.
MOST_GAP = tl.constexpr(40.0)
# The log of it is ten times what rounding, which is less than 1e-4, does to scores in that range.
SLACK = tl.constexpr(1 + 2.0**-10)


@triton.jit
def target_logits(
    logits,  # [R, V] raw
    stride,  # of a row of logits
    cuts,  # [R, 2] int32, those of `filter_cuts`; or None
    rows,  # scalar or as `ids`
    ids,
    inside,  # where `ids` are tokens
    temperature,  # scalar
):
    """Processed logits at `ids`; -inf outside."""
    x = tl.load(logits + rows * stride + ids, mask=inside, other=MINUS_INF)
    x = tempered(x, temperature)
    if cuts is not None:
        cut, first_id = tl.load(cuts + 2 * rows), tl.load(cuts + 2 * rows + 1)
        x = tl.where(is_kept(x, ids, cut, first_id), x, MINUS_INF)
    return x


@triton.jit
def temperature_of(temperatures, b):
    """1 where none are given."""
    if temperatures is None:
        temperature = 1.0
    else:
        temperature = tl.load(temperatures + b)
    return temperature


@triton.jit
def first_row(owned, b, num_drafting, REQUESTS: tl.constexpr):
    """First row of logits of request b."""
    if REQUESTS == 0:
        first = tl.load(owned + b)
    else:
        before = tl.arange(0, REQUESTS)
        rows = tl.load(owned + before, mask=(before < b) & (before < num_drafting), other=0)
        first = tl.sum(rows, axis=0) + b
    return first


# What differs from round to round makes no variants of its own.
@triton.jit(
    do_not_specialize=["num_drafting", "num_draft"],
    do_not_specialize_on_alignment=["temperatures", "cuts", "lengths", "owned"],
)
def row_stats(
    logits,  # [R, V]
    stride,  # of a row of logits
    temperatures,  # [B] float32, 0 is greedy; or None
    cuts,  # as `target_logits` takes them
    q_logits,  # [D * K, V] processed
    q_stride,  # of a row of q_logits
    lengths,  # [D] int64
    owned,  # [D] int64: rows of logits beside the first one; with REQUESTS 0 [B]: first rows
    maxima,  # [2 (p, q), B, K + 1, blocks] float32, written
    sums,  # [2, B, K + 1, blocks] float32, written: of exponentials below the maximum
    places,  # [B, K + 1, blocks] int32, written where greedy: tokens of the maxima
    num_drafting,  # D
    num_draft,  # K
    num_tokens,  # V
    num_blocks,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Program (b * (K + 1) + depth, block, of q)."""
    place, block, of_q = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, depth = place // (num_draft + 1), place % (num_draft + 1)
    length = tl.load(lengths + b, mask=b < num_drafting, other=0)
    if depth + of_q > length:
        return
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    temperature = temperature_of(temperatures, b)
    if of_q:
        row = b.to(tl.int64) * num_draft + depth
        x = clean(tl.load(q_logits + row * q_stride + columns, mask=inside, other=MINUS_INF))
    else:
        row = first_row(owned, b, num_drafting, REQUESTS) + depth
        x = target_logits(logits, stride, cuts, row, columns, inside, temperature)
    top = tl.max(x, axis=0)
    part = (of_q * tl.num_programs(0) + place).to(tl.int64) * num_blocks + block
    tl.store(maxima + part, top)
    tl.store(sums + part, tl.sum(tl.exp(x - finite(top)), axis=0))
    if (temperature == 0) & (of_q == 0):
        tl.store(places + part, tl.min(tl.where(x == top, columns, 0x7FFFFFFF), axis=0))


@triton.jit
def normalisers(maxima, sums, rows, valid, num_blocks, BLOCKS: tl.constexpr):
    """(maximum, log of the sum relative to it, its first block) of `rows` [DEPTHS]; (-inf, 0) for
    a row without mass."""
    blocks = tl.arange(0, BLOCKS)
    at = rows[:, None] * num_blocks + blocks[None, :]
    inside = valid[:, None] & (blocks < num_blocks)[None, :]
    tops = tl.load(maxima + at, mask=inside, other=MINUS_INF)
    totals = tl.load(sums + at, mask=inside, other=0.0)
    top, block = tl.max(tops, axis=1, return_indices=True)
    total = tl.sum(totals * tl.exp(tops - finite(top)[:, None]), axis=1)
    return top, tl.log(tl.where(total > 0, total, 1.0)), block


@triton.jit
def at_depth(values, depths, depth):
    """The one of `values` [DEPTHS] at `depth`."""
    return tl.max(tl.where(depths == depth, values, float("-inf")), axis=0)


@triton.jit
def log_total(tops, totals):
    """(maximum, log of the sum relative to it) of lanes that hold such a maximum and a sum; (-inf,
    0) without mass."""
    top = tl.max(tops, axis=0)
    total = tl.sum(totals * tl.exp(tops - finite(top)), axis=0)
    return top, tl.log(tl.where(total > 0, total, 1.0))


@triton.jit
def finite(top):
    """-inf minus -inf is no number: what to subtract in place of a maximum of -inf."""
    return tl.where(top == MINUS_INF, 0.0, top)


@triton.jit
def logprob(x, top, log_sum):
    """A distribution without mass gives -inf everywhere."""
    return tl.where(top == MINUS_INF, MINUS_INF, (x - finite(top)) - log_sum)


@triton.jit
def log_residual(log_p, log_q):
    """log max(p - q, 0) elementwise: log p + log(1 - exp(log q - log p))."""
    gap = tl.where(log_q == MINUS_INF, MINUS_INF, log_q - finite(log_p))
    small = -gap * (1.0 + gap * (0.5 + gap * (0.16666667 + gap * 0.041666668)))
    rest = tl.where(gap > -0.03125, small, 1.0 - tl.exp(tl.minimum(gap, 0.0)))
    positive = (gap < 0.0) & (log_p > MINUS_INF)
    return tl.where(positive, log_p + tl.log(tl.where(positive, rest, 1.0)), MINUS_INF)


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


@triton.jit
def keep_best(
    distribution,  # [BLOCK] logits
    noise,  # [BLOCK] log noise
    scores,  # [B, blocks, 2] float64, written
    winners,  # [B, blocks, 2] int32, written
    b,  # scalar
    block,  # scalar
    num_blocks,
    slot: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of a block in the race of row b. Slot 0 is the distribution to draw from, slot
    1 the one to fall back to.

    Scores are float64 and formed below the block's maximum, so that large logits do not round the
    noise away.
    """
    top = finite(tl.max(distribution, axis=0))
    best, at = tl.max((distribution - top) - noise, axis=0, return_indices=True)
    place = (b * num_blocks + block) * 2 + slot
    tl.store(scores + place, best.to(tl.float64) + top.to(tl.float64))
    tl.store(winners + place, block * BLOCK + at)


@triton.jit
def winner(scores, winners, b, slot, num_blocks, BLOCKS: tl.constexpr):
    """The best block's token; -1 when every score is -inf."""
    blocks = tl.arange(0, BLOCKS)
    values = tl.load(
        scores + (b * num_blocks + blocks) * 2 + slot, mask=blocks < num_blocks, other=MINUS_INF
    )
    best, at = tl.max(values, axis=0, return_indices=True)
    token = tl.load(winners + (b * num_blocks + at) * 2 + slot)
    return tl.where(best == MINUS_INF, -1, token)


@triton.jit(do_not_specialize=["num_draft"], do_not_specialize_on_alignment=["draft_tokens"])
def emit(
    draft_tokens,  # [B, K] int64
    accepted,  # [B] int64
    scores,  # [B, blocks, 2] float64
    winners,  # [B, blocks, 2] int32
    tokens,  # [B, K + 1] int64, written
    num_draft,  # K
    num_blocks,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program b writes row b of the output: kept drafts, the winner, -1."""
    b = tl.program_id(0).to(tl.int64)
    kept = tl.load(accepted + b)
    token = winner(scores, winners, b, 0, num_blocks, BLOCKS)
    token = tl.where(token < 0, winner(scores, winners, b, 1, num_blocks, BLOCKS), token)
    columns = tl.arange(0, COLUMNS)
    drafts = tl.load(draft_tokens + b * num_draft + columns, mask=columns < kept, other=-1)
    output = tl.where(columns == kept, token.to(tl.int64), drafts)
    tl.store(tokens + b * (num_draft + 1) + columns, output, mask=columns <= num_draft)


def contiguous_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


class VerifyRows(NamedTuple):
    """Distributions of a round, and room for what kernels write of them."""

    logits: torch.Tensor  # [R, V]
    temperatures: torch.Tensor | None  # [B] float32, None for processed logits
    cuts: torch.Tensor | None
    q_logits: torch.Tensor  # [D * K, V]; p, which nothing reads, where there are none
    has_q: bool
    tokens: torch.Tensor  # [D, K]
    lengths: torch.Tensor  # [D]
    owned: torch.Tensor
    num_requests: int
    summed: int  # REQUESTS of `first_row`
    block: int
    num_blocks: int
    stats: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # maxima, sums, places
    choices: torch.Tensor
    scales: torch.Tensor
    raced: torch.Tensor
    verdicts: torch.Tensor  # [B, K + 2] int64

    @property
    def distributions(self) -> tuple[torch.Tensor | int | None, ...]:
        """First arguments of the kernels."""
        p, q = self.logits, self.q_logits
        return p, p.stride(0), self.temperatures, self.cuts, q, q.stride(0)

    @property
    def decision(self) -> tuple[torch.Tensor, ...]:
        return self.choices, self.scales, self.raced, self.verdicts

    @property
    def paddings(self) -> dict[str, int]:
        depths = max(FEWEST_DEPTHS, triton.next_power_of_2(self.tokens.shape[1] + 1))
        blocks = triton.next_power_of_2(self.num_blocks)
        return {"BLOCKS": blocks, "DEPTHS": depths}


def rows_of(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    cuts: torch.Tensor | None,
    drafts: Drafts,
    num_requests: int,
    block: int,
) -> VerifyRows:
    """Distributions for kernels of `block` tokens of the vocabulary per program."""
    num_drafting, num_draft = drafts.tokens.shape
    num_tokens = logits.shape[-1]
    block = min(block, triton.next_power_of_2(num_tokens))
    num_blocks = triton.cdiv(num_tokens, block)
    tokens, lengths, owned = (
        tensor.contiguous() for tensor in (drafts.tokens, drafts.lengths, drafts.sizes)
    )
    summed = max(_FEWEST_REQUESTS, triton.next_power_of_2(num_requests))
    if num_requests > MOST_SUMMED:
        summed = 0
        counts = torch.nn.functional.pad(owned, (0, num_requests - num_drafting)) + 1
        owned = counts.cumsum(0) - counts
    logits = contiguous_rows(logits)
    has_q = drafts.logits is not None and num_draft > 0
    q_logits = logits
    if drafts.logits is not None and num_draft > 0:
        q_logits = contiguous_rows(drafts.logits.flatten(0, 1))

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    measures = num_requests, num_draft + 1, num_blocks
    return VerifyRows(
        logits,
        None if temperatures is None else temperatures.contiguous(),
        cuts,
        q_logits,
        has_q,
        tokens,
        lengths,
        owned,
        num_requests,
        summed,
        block,
        num_blocks,
        (
            empty(2, *measures, dtype=torch.float32),
            empty(2, *measures, dtype=torch.float32),
            empty(*measures, dtype=torch.int32),
        ),
        empty(num_requests, NUM_CHOICES.value, dtype=torch.int64),
        empty(num_requests, NUM_SCALES.value, dtype=torch.float32),
        empty(num_requests, dtype=torch.int32),
        empty(num_requests, num_draft + 2, dtype=torch.int64),
    )


@on_its_device
def measure_rows(rows: VerifyRows) -> None:
    num_drafting, num_draft = rows.tokens.shape
    programs = rows.num_requests * (num_draft + 1), rows.num_blocks, 1 + rows.has_q
    row_stats[programs](
        *rows.distributions,
        rows.lengths,
        rows.owned,
        *rows.stats,
        num_drafting,
        num_draft,
        rows.logits.shape[-1],
        rows.num_blocks,
        BLOCK=rows.block,
        REQUESTS=rows.summed,
        num_warps=4 if rows.cuts is None else 8,
    )


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
