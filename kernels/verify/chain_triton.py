"""Chain verification in Triton, of raw logits or of processed ones, in one launch: temperature,
tests, residuals and draws. No buffer of size [rows, V] is made; what is kept is O(rows x blocks).

A program takes a ticket, and tickets are worked off in their order: first those that measure a
block of a row (maximum and sum of exponentials of p, and of q), then those that race over a block
of a request's deciding row. A race waits until its request is measured. The measuring programs have
begun by then and wait for nothing, so that the wait ends whatever the order in which a device
starts programs. Every race works out what was kept by itself; the last one of a request writes its
row of the output.

Legend as in `chain.py`; D of the B requests have drafted tokens, and come first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device
from draftsmith.kernels.sampling.draw_triton import filter_cuts
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.filters_triton import MINUS_INF, clean
from draftsmith.kernels.sampling.random_streams_triton import (
    ACCEPT,
    BONUS,
    RESIDUAL,
    log_noise,
    stream_key,
    uniform,
)
from draftsmith.kernels.verify.chain import no_drafts, owners
from draftsmith.kernels.verify.rows_triton import (
    FEWEST_DEPTHS,
    contiguous_rows,
    finite,
    keep_best,
    log_residual,
    logprob,
    target_logits,
    winner,
)
from draftsmith.kernels.verify.verdict import Drafts, Verdict

BLOCK = 4096
# Requests whose rows each program adds up by itself: the most, and the fewest that it is compiled
# for.
MOST_SUMMED = 1024
_FEWEST_REQUESTS = 64


@triton.jit
def _first_row(owned, b, num_drafting, REQUESTS: tl.constexpr):
    """First row of logits of request b."""
    if REQUESTS == 0:
        first = tl.load(owned + b)
    else:
        before = tl.arange(0, REQUESTS)
        rows = tl.load(owned + before, mask=(before < b) & (before < num_drafting), other=0)
        first = tl.sum(rows, axis=0) + b
    return first


@triton.jit
def _measure(x, columns, maxima, sums, places, place):
    """Writes the maximum of a block, its token and the sum of exponentials below it."""
    top, at = tl.max(x, axis=0, return_indices=True)
    tl.store(maxima + place, top)
    tl.store(sums + place, tl.sum(tl.exp(x - finite(top)), axis=0))
    tl.store(places + place, tl.min(columns, axis=0) + at)


@triton.jit
def _normalisers(maxima, sums, rows, valid, num_blocks, BLOCKS: tl.constexpr):
    """(maximum, log of the sum relative to it, its first block) of `rows` [DEPTHS]; (-inf, 0) for
    a row without mass."""
    blocks = tl.arange(0, BLOCKS)
    at = rows[:, None] * num_blocks + blocks[None, :]
    inside = valid[:, None] & (blocks < num_blocks)[None, :]
    tops = tl.load(maxima + at, mask=inside, other=MINUS_INF, cache_modifier=".cg")
    totals = tl.load(sums + at, mask=inside, other=0.0, cache_modifier=".cg")
    top, block = tl.max(tops, axis=1, return_indices=True)
    total = tl.sum(totals * tl.exp(tops - finite(top)[:, None]), axis=1)
    return top, tl.log(tl.where(total > 0, total, 1.0)), block


@triton.jit
def _at(values, depths, depth):
    """The one of `values` [DEPTHS] at `depth`."""
    return tl.max(tl.where(depths == depth, values, float("-inf")), axis=0)


# What differs from round to round makes no variants of its own.
@triton.jit(
    do_not_specialize=["num_requests", "num_drafting", "num_draft"],
    do_not_specialize_on_alignment=[
        "temperatures", "cuts", "draft_tokens", "lengths", "owned", "seeds", "positions",
    ],
)  # fmt: skip
def _verify(
    logits,  # [R, V] raw
    stride,  # of a row of logits
    temperatures,  # [B] float32, 0 is greedy
    cuts,  # [R, 2] int32, those of `filter_cuts`; or None
    q_logits,  # [D * K, V] processed
    q_stride,  # of a row of q_logits
    draft_tokens,  # [D, K] int64
    lengths,  # [D] int64
    owned,  # [D] int64: rows of logits beside the first one; with REQUESTS 0 [B]: first rows
    seeds,  # [B] int64
    positions,  # [B] int64
    maxima,  # [2 (p, q), B, K + 1, blocks] float32, written
    sums,  # [2, B, K + 1, blocks] float32, written
    places,  # [2, B, K + 1, blocks] int32, written: tokens of the maxima
    scores,  # [B, blocks, 2] float64, written
    winners,  # [B, blocks, 2] int32, written
    counters,  # [1 + 2 B] int32, zeros: tickets; measured and raced blocks of each request
    verdicts,  # [B, K + 2] int64, written: accepted, tokens
    num_requests,  # B
    num_drafting,  # D
    num_draft,  # K
    num_tokens,  # V
    num_blocks,
    HAS_Q: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPTHS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Program of one ticket."""
    ticket = tl.atomic_add(counters, 1).to(tl.int64)
    rows = num_draft + 1
    num_measures = num_requests * rows * num_blocks
    measured = counters + 1
    raced = counters + 1 + num_requests
    q_begin = num_requests * rows * num_blocks
    if ticket < num_measures:
        block = ticket % num_blocks
        depth = ticket // num_blocks % rows
        b = ticket // (num_blocks * rows)
        length = tl.load(lengths + b, mask=b < num_drafting, other=0)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < num_tokens
        if depth <= length:
            row = _first_row(owned, b, num_drafting, REQUESTS) + depth
            degree = tl.load(temperatures + b)
            x = target_logits(logits, stride, cuts, row, columns, inside, degree)
            _measure(x, columns, maxima, sums, places, ticket)
        if HAS_Q and depth < length:
            q_row = b * num_draft + depth
            x = tl.load(q_logits + q_row * q_stride + columns, mask=inside, other=MINUS_INF)
            _measure(clean(x), columns, maxima, sums, places, q_begin + ticket)
        tl.debug_barrier()  # all of the program's writes come before its count
        tl.atomic_add(measured + b, 1, sem="release")
    else:
        block = (ticket - num_measures) % num_blocks
        b = (ticket - num_measures) // num_blocks
        count = tl.atomic_add(measured + b, 0, sem="acquire")
        while count < rows * num_blocks:
            count = tl.atomic_add(measured + b, 0, sem="acquire")
        depths = tl.arange(0, DEPTHS)
        length = tl.load(lengths + b, mask=b < num_drafting, other=0)
        first = _first_row(owned, b, num_drafting, REQUESTS)
        seed, position = tl.load(seeds + b), tl.load(positions + b)
        temperature = tl.load(temperatures + b)
        # What is kept of all depths at once: those before the first one that fails.
        tokens = tl.load(draft_tokens + b * num_draft + depths, mask=depths < length, other=-1)
        offered = tokens >= 0
        p_rows = b * rows + depths
        top, log_sum, top_block = _normalisers(
            maxima, sums, p_rows, depths <= length, num_blocks, BLOCKS
        )
        likeliest = tl.load(
            places + p_rows * num_blocks + top_block, mask=depths <= length, other=0,
            cache_modifier=".cg",
        )  # fmt: skip
        own = first + tl.where(offered, depths, 0)
        x = target_logits(logits, stride, cuts, own, tokens, offered, temperature)
        log_p = logprob(x, top, log_sum)
        if temperature == 0:
            log_p = tl.where((tokens == likeliest) & (top > MINUS_INF), 0.0, MINUS_INF)
        log_q = tl.zeros([DEPTHS], tl.float32)
        q_top, q_log_sum = log_q, log_q
        if HAS_Q:
            q_rows = num_requests * rows + p_rows
            q_top, q_log_sum, _ = _normalisers(
                maxima, sums, q_rows, depths < length, num_blocks, BLOCKS
            )
            x = tl.load(
                q_logits + (b * num_draft + depths) * q_stride + tokens,
                mask=offered, other=MINUS_INF,
            )  # fmt: skip
            log_q = logprob(clean(x), q_top, q_log_sum)
        log_u = tl.log(uniform(stream_key(seed, position + depths, ACCEPT), 0))
        keep = offered & (log_u + log_q.to(tl.float64) < log_p.to(tl.float64))
        keep = keep & (log_q > MINUS_INF)
        kept = tl.min(tl.where(keep, DEPTHS, depths), axis=0).to(tl.int64)
        rejected = kept < length
        # The race over this block of the deciding row.
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < num_tokens
        p_row = first + kept
        p = target_logits(logits, stride, cuts, p_row, columns, inside, temperature)
        p_top = _at(top, depths, kept)
        p_log_sum = _at(log_sum, depths, kept)
        if temperature == 0:
            best = tl.max(tl.where(depths == kept, likeliest, -1), axis=0)
            p_top = tl.where(p_top == MINUS_INF, MINUS_INF, 0.0)
            p = tl.where(columns == best, p_top, MINUS_INF)
            p_log_sum = tl.zeros_like(p_log_sum)
        purpose = tl.where(rejected, RESIDUAL, BONUS)
        noise = log_noise(stream_key(seed, position + kept, purpose), columns)
        distribution = p
        if rejected:
            if HAS_Q:
                q = tl.load(
                    q_logits + (b * num_draft + kept) * q_stride + columns,
                    mask=inside, other=MINUS_INF,
                )  # fmt: skip
                # A token that q could not have drawn is no draft: as if q had no mass, p answers.
                drawn = _at(log_q, depths, kept) > MINUS_INF
                q = logprob(clean(q), _at(q_top, depths, kept), _at(q_log_sum, depths, kept))
                q = tl.where(drawn, q, MINUS_INF)
            else:
                token = tl.max(tl.where(depths == kept, tokens, -1), axis=0)
                q = tl.where(columns == token, 0.0, MINUS_INF)
            distribution = log_residual(logprob(p, p_top, p_log_sum), q)
        keep_best(distribution, noise, scores, winners, b, block, num_blocks, 0, BLOCK)
        keep_best(p, noise, scores, winners, b, block, num_blocks, 1, BLOCK)
        tl.debug_barrier()
        if tl.atomic_add(raced + b, 1, sem="acq_rel") == num_blocks - 1:
            token = winner(scores, winners, b, 0, num_blocks, BLOCKS)
            token = tl.where(token < 0, winner(scores, winners, b, 1, num_blocks, BLOCKS), token)
            row = tl.where(depths < kept, tokens, tl.where(depths == kept, token, -1))
            place = verdicts + b * (rows + 1)
            tl.store(place, kept)
            tl.store(place + 1 + depths, row.to(tl.int64), mask=depths < rows)


def verify_chain_triton(
    p_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    lengths: torch.Tensor,
    q_logits: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    sizes: torch.Tensor | None = None,
    block: int | None = None,
) -> Verdict:
    """`chain.verify_chain` in float32; `block` tokens of the vocabulary per program."""
    ones = torch.ones(len(seeds), dtype=torch.float32, device=seeds.device)
    drafts = Drafts(draft_tokens, lengths, q_logits, lengths if sizes is None else sizes)
    verdicts = verify_tempered(p_logits, ones, drafts, seeds, positions, block=block)
    return Verdict(verdicts[:, 0], verdicts[:, 1:])


def verify_logits_triton(
    logits: torch.Tensor,
    rows: SamplingRows,
    drafts: Drafts | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """`chain.verify_logits` in float32."""
    drafts = no_drafts(logits) if drafts is None else drafts
    cuts = None
    if rows.passes.filtered:
        cuts = filter_cuts(logits, rows.select(owners(drafts, len(seeds), len(logits))))
    return verify_tempered(logits, rows.temperature, drafts, seeds, positions, cuts=cuts)


@on_its_device
def verify_tempered(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    drafts: Drafts,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    cuts: torch.Tensor | None = None,
    block: int | None = None,
) -> torch.Tensor:
    """As `verify_logits_triton`, of temperatures [B] float32 and the cuts of `filter_cuts` where a
    row is filtered."""
    num_requests, (num_drafting, num_draft) = len(seeds), drafts.tokens.shape
    num_tokens = logits.shape[-1]
    block = min(block or BLOCK, triton.next_power_of_2(num_tokens))
    num_blocks = triton.cdiv(num_tokens, block)
    tokens, lengths, owned = (
        tensor.contiguous() for tensor in (drafts.tokens, drafts.lengths, drafts.sizes)
    )
    requests = max(_FEWEST_REQUESTS, triton.next_power_of_2(num_requests))
    if num_requests > MOST_SUMMED:
        requests = 0
        counts = torch.nn.functional.pad(owned, (0, num_requests - num_drafting)) + 1
        owned = counts.cumsum(0) - counts
    logits = contiguous_rows(logits)
    has_q = drafts.logits is not None and num_draft > 0
    # Without draft distributions the kernel gets p in their place and never reads it.
    q_rows = logits
    if drafts.logits is not None and num_draft > 0:
        q_rows = contiguous_rows(drafts.logits.flatten(0, 1))

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    measures = (2, num_requests, num_draft + 1, num_blocks)
    verdicts = empty(num_requests, num_draft + 2, dtype=torch.int64)
    if num_requests == 0:
        return verdicts
    _verify[(num_requests * (num_draft + 2) * num_blocks,)](
        logits,
        logits.stride(0),
        temperatures.contiguous(),
        cuts,
        q_rows,
        q_rows.stride(0),
        tokens,
        lengths,
        owned,
        seeds.contiguous(),
        positions.contiguous(),
        empty(*measures, dtype=torch.float32),
        empty(*measures, dtype=torch.float32),
        empty(*measures, dtype=torch.int32),
        empty(num_requests, num_blocks, 2, dtype=torch.float64),
        empty(num_requests, num_blocks, 2, dtype=torch.int32),
        torch.zeros(1 + 2 * num_requests, dtype=torch.int32, device=logits.device),
        verdicts,
        num_requests,
        num_drafting,
        num_draft,
        num_tokens,
        num_blocks,
        HAS_Q=has_q,
        BLOCK=block,
        BLOCKS=triton.next_power_of_2(num_blocks),
        DEPTHS=max(FEWEST_DEPTHS, triton.next_power_of_2(num_draft + 1)),
        REQUESTS=requests,
        num_warps=8,
    )
    return verdicts
