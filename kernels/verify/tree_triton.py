"""Tree verification in Triton: three launches that read only the rows of nodes which a walk visits.

1. `_walk`: goes down each tree, a pass over the vocabulary at a time. A pass reads the rows of a
  node for their normalisers, or once more for a further sibling after a rejection. Each program has
  a slice of one pass of a request, in the order of tickets that they take: all requests' first
  passes, then all second ones. The last program of a pass decides what follows, and those of the
  next pass wait for it. Programs of earlier tickets have begun by then and wait for no later one:
  the wait ends whatever the order in which a device starts programs.
2. `tree_race`: one program per block of each deciding row; log of what is left of p, minus log E.
3. `emit`: the winner of the blocks, and the row of output tokens.

What is left of p after rejections needs no row of its own. A child x is rejected when u a q(x) >=
max(p(x) - A q(x), 0), where A = 0 and a = 1 for the first one, and from then on A grows by a: the
residual of a residual is

    max(max(p - A q, 0) - a q, 0) = max(p - (A + a) q, 0),

and the rejected x, no longer subtracted from then on, has nothing left there anyway. With m the
mass of max(p - A q, 0) and r that of q without the rejected tokens, the next sibling's
distributions are max(p - A q, 0) / m and q / r, so a = m / r. One scalar A a node is all there is
to keep; m and r are sums over the vocabulary, r in logs because the distribution of a last sibling
may be tiny in q. A is held as log A minus the normaliser of q, and added to logits of q, both
relative to the largest logit of q: large logits would round it away. The residual of deterministic
children is p without them.

The reference, `tree.verify_tree`, takes residuals of residuals, row by row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device, side_by_side
from draftsmith.kernels.sampling.filters_triton import MINUS_INF, clean
from draftsmith.kernels.sampling.random_streams_triton import ACCEPT, stream_key, uniform
from draftsmith.kernels.verify.rows_triton import finite, log_residual, log_total, logprob
from draftsmith.kernels.verify.tree_race_triton import (
    NUM_STANDS,
    VECTORS,
    emit,
    is_tried,
    tree_race,
)
from draftsmith.kernels.verify.verdict import DraftTree, TreeVerdict

BLOCK = 4096
# Of a walk: tokens of a step, and the most programs of a pass. Their registers leave room for
# four programs on a multiprocessor, so that the passes of 64 requests run at once.
STEP, SLICES = 1024, 8
WALKING = {"num_warps": 8, "maxnreg": 64}
_SLICES = tl.constexpr(SLICES)
_STAGES = tl.constexpr(4)  # loads run ahead of the sums
# What a pass measures: the rows of a node, or what is left of them after a rejection.
_ARRIVAL, _REST = tl.constexpr(1), tl.constexpr(2)
# Nodes of a tree that kernels are compiled for at least.
_FEWEST_NODES = 64


@triton.jit
def _add_up(x, tops, totals):
    """Maxima and sums of exponentials of lanes with x added to them."""
    higher = tl.maximum(tops, x)
    return higher, totals * tl.exp(tops - finite(higher)) + tl.exp(x - finite(higher))


@triton.jit
def _measure(
    parts,  # [6] float32 of a slice, written
    row,  # [V] pointer
    begin,  # scalar, first column of the slice
    end,  # scalar
    BLOCK: tl.constexpr,
):
    """Writes the maximum of a slice of the logits at `row` and the sum of exponentials below it.
    Each lane sums its columns: the loop reduces nothing."""
    tops = tl.full([BLOCK], MINUS_INF, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=_STAGES):
        columns = start + tl.arange(0, BLOCK)
        x = clean(tl.load(row + columns, mask=columns < end, other=MINUS_INF))
        tops, totals = _add_up(x, tops, totals)
    top = tl.max(tops, axis=0)
    tl.store(parts, top)
    tl.store(parts + 1, tl.sum(totals * tl.exp(tops - finite(top)), axis=0))


@triton.jit
def _measure_rest(
    parts,  # [6] float32 of a slice, written
    p_row,  # [V] pointer
    p_top,  # scalar
    p_log_sum,  # scalar
    q_row,  # [V] pointer
    q_top,  # scalar
    is_drawn,  # scalar bool
    log_scale,  # scalar, log A
    tokens,  # [N] int64
    parents,  # [N] int64
    node,  # scalar
    first,  # scalar
    last,  # scalar
    begin,  # scalar, first column of the slice
    end,  # scalar
    HAS_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes, of a slice, the mass left of p once the children of `node` among the nodes `first` ..
    `last` - 1 are rejected, and what is left of q, relative to `q_top`, as `_measure` does."""
    mass = tl.zeros([BLOCK], tl.float32)
    tops = tl.full([BLOCK], MINUS_INF, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    q_end = tl.where(is_drawn, end, 0)
    for start in range(begin, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tried = is_tried(columns, tokens, parents, node, first, last)
        p = clean(tl.load(p_row + columns, mask=columns < end, other=MINUS_INF))
        log_p = logprob(p, p_top, p_log_sum)
        left = tl.where(tried, MINUS_INF, log_p)
        if HAS_Q:
            q = clean(tl.load(q_row + columns, mask=columns < q_end, other=MINUS_INF))
            q -= finite(q_top)
            left = tl.where(is_drawn, log_residual(log_p, q + log_scale), left)
            tops, totals = _add_up(tl.where(tried, MINUS_INF, q), tops, totals)
        mass += tl.exp(left)
    tl.store(parts, tl.sum(mass, axis=0))
    top = tl.max(tops, axis=0)
    tl.store(parts + 2, top)
    tl.store(parts + 3, tl.sum(totals * tl.exp(tops - finite(top)), axis=0))


@triton.jit
def _log_add(a, b):
    """log(exp(a) + exp(b)) of float64 scalars; b is finite."""
    top = tl.maximum(a, b)
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit(
    do_not_specialize=["num_requests", "num_nodes", "num_slices"],
    do_not_specialize_on_alignment=VECTORS,
)
def _walk(
    p_logits,  # [R, V]
    p_stride,  # of a row of p_logits
    q_logits,  # [Q, V]
    q_stride,  # of a row of q_logits
    q_rows,  # [B, N + 1] int64, -1 where no q was given
    tokens,  # [B, N] int64
    parents,  # [B, N] int64
    lengths,  # [B] int64
    first_rows,  # [B] int64, first row of p of each request
    seeds,  # [B] int64
    positions,  # [B] int64
    nodes,  # [B, N] int64, written
    drafts,  # [B, N] int64, written
    accepted,  # [B] int64, written
    stands,  # [B, NUMBERS] int64, written: see `_decide`
    scales,  # [B, 4] float32, written: p_top, p_log_sum, q_top, log A
    log_scales,  # [B] float64, written: log A
    parts,  # [B, slices, 4] float32, written
    counters,  # [1 + 2 B] int32, zeros: tickets; measured slices and decided passes of each request
    num_requests,  # B
    num_nodes,  # N
    num_tokens,  # V
    num_slices,
    slice_size,
    HAS_Q: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program of one ticket: a slice of the vocabulary in one pass of a request."""
    ticket = tl.atomic_add(counters, 1)
    number = ticket // (num_requests * num_slices)
    b = (ticket // num_slices % num_requests).to(tl.int64)
    own_slice = ticket % num_slices
    decided = counters + 1 + num_requests + b
    passes = number
    if number > 0:
        passes = tl.atomic_add(decided, 0, sem="acquire")
        while passes < number:
            passes = tl.atomic_add(decided, 0, sem="acquire")
    if passes > num_nodes:
        return
    tokens += b * num_nodes
    parents += b * num_nodes
    stands += b * NUM_STANDS
    scales += b * 4
    parts += b * num_slices * 4
    later = number > 0
    node = tl.load(stands, mask=later, other=-1, cache_modifier=".cg")
    begin = tl.load(stands + 1, mask=later, other=-1, cache_modifier=".cg")
    last = tl.load(stands + 2, mask=later, other=0, cache_modifier=".cg")
    kind = tl.load(stands + 5, mask=later, other=_ARRIVAL, cache_modifier=".cg")
    p_top = tl.load(scales, mask=later, other=0.0, cache_modifier=".cg")
    p_log_sum = tl.load(scales + 1, mask=later, other=0.0, cache_modifier=".cg")
    q_top = tl.load(scales + 2, mask=later, other=0.0, cache_modifier=".cg")
    log_scale = tl.load(log_scales + b, mask=later, other=MINUS_INF, cache_modifier=".cg")
    length = tl.load(lengths + b)
    p_row = p_logits + (tl.load(first_rows + b) + node + 1) * p_stride
    is_drawn = length < 0
    q_row = q_logits
    if HAS_Q:
        distribution = tl.load(q_rows + b * (num_nodes + 1) + node + 1)
        is_drawn = (distribution >= 0) & (length > 0)
        q_row = q_logits + tl.maximum(distribution, 0) * q_stride
    start = own_slice * slice_size
    end = tl.minimum(start + slice_size, num_tokens)
    own = parts + own_slice * 4
    if kind == _ARRIVAL:
        if length > 0:
            _measure(own, p_row, start, end, BLOCK)
        if is_drawn:
            _measure(own + 2, q_row, start, end, BLOCK)
    else:
        _measure_rest(
            own, p_row, p_top, p_log_sum, q_row, q_top, is_drawn, log_scale.to(tl.float32),
            tokens, parents, node, begin, last, start, end, HAS_Q, BLOCK,
        )  # fmt: skip
    tl.debug_barrier()  # all of the program's writes come before its count
    measured = tl.atomic_add(counters + 1 + b, 1, sem="acq_rel")
    if measured == (number + 1) * num_slices - 1:
        _decide(
            p_row, p_top, p_log_sum, q_row, q_top, is_drawn, log_scale, tokens, parents,
            length, tl.load(seeds + b), tl.load(positions + b), nodes + b * num_nodes,
            drafts + b * num_nodes, accepted + b, stands, scales, log_scales + b, parts, decided,
            number, node, begin, last, kind, num_nodes, num_slices, COLUMNS,
        )  # fmt: skip


@triton.jit
def _decide(
    p_row,  # [V] pointer
    p_top,
    p_log_sum,
    q_row,  # [V] pointer
    q_top,
    is_drawn,
    log_scale,  # float64, log A
    tokens,  # [N] int64
    parents,  # [N] int64
    length,
    seed,
    position,
    nodes,  # [N] int64, written
    drafts,  # [N] int64, written
    accepted,  # int64, written
    stands,  # [NUMBERS] int64, written: last node, its first tested child or -1, where the walk
    # goes on, kept nodes, tested children, what the next pass measures or 0
    scales,  # [4] float32, written
    log_scales,  # float64, written
    parts,  # [slices, 4] float32
    decided,  # int32, written
    pass_number,
    node,
    begin,
    last,
    kind,  # what this pass has measured
    num_nodes,  # N
    num_slices,
    COLUMNS: tl.constexpr,
):
    """Goes on with a walk until the next pass is needed, or to its end."""
    lanes = tl.arange(0, _SLICES)
    inside = lanes < num_slices
    parts += lanes * 4
    of_p = tl.load(parts, mask=inside, other=MINUS_INF, cache_modifier=".cg")
    of_q = inside & is_drawn
    q_tops = tl.load(parts + 2, mask=of_q, other=MINUS_INF, cache_modifier=".cg")
    q_top_left, q_log_sum = log_total(
        q_tops, tl.load(parts + 3, mask=of_q, other=0.0, cache_modifier=".cg")
    )
    if kind == _ARRIVAL:
        totals = tl.load(parts + 1, mask=inside, other=0.0, cache_modifier=".cg")
        p_top, p_log_sum = log_total(of_p, totals)
        q_top = q_top_left
        log_step = -q_log_sum.to(tl.float64)
        log_scale = log_step * 0 + MINUS_INF
    else:
        mass = tl.sum(tl.where(inside, of_p, 0.0), axis=0).to(tl.float64)
        log_rest = q_top_left.to(tl.float64) + q_log_sum.to(tl.float64)
        # Without mass left, which only rounding can bring about, p starts anew.
        log_scale = tl.where(mass > 0, log_scale, MINUS_INF)
        log_step = tl.log(tl.where(mass > 0, mass, 1.0)) - tl.where(is_drawn, log_rest, 0.0)
    later = pass_number > 0
    kept = tl.load(stands + 3, mask=later, other=0, cache_modifier=".cg")
    number = tl.load(stands + 4, mask=later, other=0, cache_modifier=".cg")
    here = length >= 0
    pending = length < 0
    needed = kept * 0
    while (last < length) & (needed == 0):
        if tl.load(parents + last) == node:
            if here:
                begin = tl.where(number == 0, last, begin)
                token = tl.load(tokens + last)
                q = tl.zeros((), tl.float32)
                if is_drawn:
                    q = clean(tl.load(q_row + token, mask=token >= 0, other=MINUS_INF))
                    q -= finite(q_top)
                seen = is_tried(token, tokens, parents, node, begin, last)
                if (token >= 0) & (q > MINUS_INF) & (seen == 0):
                    if pending:
                        needed += _REST
                    else:
                        log_p = logprob(clean(tl.load(p_row + token)), p_top, p_log_sum)
                        left = log_residual(log_p, q + log_scale.to(tl.float32)).to(tl.float64)
                        log_u = tl.log(uniform(stream_key(seed, position + kept, ACCEPT), number))
                        if log_u + q.to(tl.float64) + log_step < left:
                            tl.store(nodes + kept, last)
                            tl.store(drafts + kept, token)
                            kept += 1
                            node = last
                            number = kept * 0 - 1
                            here = length < 0
                        else:
                            pending = length >= 0
                            if is_drawn:
                                log_scale = _log_add(log_scale, log_step)
                number += tl.where(needed == 0, 1, 0)
            else:
                needed += _ARRIVAL
        last += tl.where(needed == 0, 1, 0)
    tl.store(stands, node)
    tl.store(stands + 1, tl.where(number > 0, begin, -1))
    tl.store(stands + 2, last)
    tl.store(stands + 3, kept)
    tl.store(stands + 4, number)
    tl.store(stands + 5, needed)
    tl.store(scales, p_top)
    tl.store(scales + 1, p_log_sum)
    tl.store(scales + 2, q_top)
    tl.store(scales + 3, log_scale.to(tl.float32))
    tl.store(log_scales, log_scale)
    if needed == 0:
        tl.store(accepted, kept)
        columns = tl.arange(0, COLUMNS)
        beyond = (columns >= kept) & (columns < num_nodes)
        tl.store(nodes + columns, -1, mask=beyond)
        tl.store(drafts + columns, -1, mask=beyond)
    tl.debug_barrier()
    tl.atomic_xchg(decided, tl.where(needed == 0, num_nodes, pass_number) + 1, sem="release")


@on_its_device
def verify_tree_triton(
    p_logits: torch.Tensor,
    tree: DraftTree,
    q_logits: torch.Tensor | None,
    q_rows: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    block: int = BLOCK,
) -> TreeVerdict:
    """`tree.verify_tree` in float32; `block` tokens of the vocabulary per program
    or step."""
    num_requests, num_nodes = tree.tokens.shape
    num_tokens = p_logits.shape[-1]
    block = min(block, triton.next_power_of_2(num_tokens))
    num_blocks = triton.cdiv(num_tokens, block)
    device = p_logits.device
    tokens, parents, lengths, seeds, positions = (t.contiguous() for t in (*tree, seeds, positions))
    first_rows = torch.cumsum(lengths + 1, 0) - (lengths + 1)
    p_logits = side_by_side(p_logits)
    # Without draft distributions the kernels get p and the parents in their places and never read
    # them.
    has_q = q_logits is not None and q_rows is not None
    q_logits = side_by_side(q_logits) if q_logits is not None else p_logits
    q_rows = q_rows.contiguous() if q_rows is not None else parents
    distributions = (p_logits, p_logits.stride(0), q_logits, q_logits.stride(0), q_rows)
    requests = (tokens, parents, lengths, first_rows, seeds, positions)
    nodes, drafts, stands = (
        torch.empty(num_requests, width, dtype=torch.int64, device=device)
        for width in (num_nodes, num_nodes, NUM_STANDS.value)
    )
    accepted = torch.empty(num_requests, dtype=torch.int64, device=device)
    scales = torch.empty(num_requests, 4, dtype=torch.float32, device=device)
    scores = torch.empty(num_requests, 2, num_blocks, dtype=torch.float64, device=device)
    winners = torch.empty(num_requests, 2, num_blocks, dtype=torch.int32, device=device)
    output = torch.empty(num_requests, num_nodes + 1, dtype=torch.int64, device=device)
    if num_requests:
        columns = max(_FEWEST_NODES, triton.next_power_of_2(num_nodes + 1))
        step = min(block, STEP)
        slice_size = triton.cdiv(triton.cdiv(num_tokens, SLICES), step) * step
        num_slices = triton.cdiv(num_tokens, slice_size)
        _walk[(max(num_nodes, 1) * num_requests * num_slices,)](
            *distributions,
            *requests,
            nodes,
            drafts,
            accepted,
            stands,
            scales,
            torch.empty(num_requests, dtype=torch.float64, device=device),
            torch.empty(num_requests, num_slices, 4, dtype=torch.float32, device=device),
            torch.zeros(1 + 2 * num_requests, dtype=torch.int32, device=device),
            num_requests,
            num_nodes,
            num_tokens,
            num_slices,
            slice_size,
            HAS_Q=has_q,
            COLUMNS=columns,
            BLOCK=step,
            **WALKING,
        )
        tree_race[(num_requests, num_blocks)](
            *distributions,
            *requests,
            accepted,
            stands,
            scales,
            scores,
            winners,
            num_nodes,
            num_tokens,
            num_blocks,
            HAS_Q=has_q,
            BLOCK=block,
            num_warps=8,
        )
        blocks = triton.next_power_of_2(num_blocks)
        emit[(num_requests,)](
            drafts,
            accepted,
            scores,
            winners,
            output,
            num_nodes,
            num_blocks,
            COLUMNS=columns,
            BLOCKS=blocks,
            num_warps=1,
        )
    return TreeVerdict(accepted, output, nodes)
