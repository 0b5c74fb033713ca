"""Tree verification in Triton: three launches that read only the rows of nodes which a walk visits.

1. `_walk`: one program per request goes down its tree. At a node it reads the distributions of p
  and q once for their normalisers, and once more for every further sibling after a rejection.
2. `_race`: one program per block of each deciding row; log of what is left of p, minus log E.
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

from draftsmith.kernels.dispatch import on_its_device
from draftsmith.kernels.sampling.random_streams_triton import (
    ACCEPT,
    BONUS,
    RESIDUAL,
    log_noise,
    stream_key,
    uniform,
)
from draftsmith.kernels.verify.rows_triton import (
    MINUS_INF,
    clean,
    contiguous_rows,
    emit,
    finite,
    keep_best,
    log_residual,
    log_total,
    logprob,
)
from draftsmith.kernels.verify.verdict import DraftTree, TreeVerdict

BLOCK = 4096
# A walk is one program alone with its rows: only loads that run ahead of the sums keep it near the
# bandwidth.
_STAGES = tl.constexpr(4)
# Nodes of a tree that kernels are compiled for at least.
_FEWEST_NODES = 64
# What differs from round to round makes no variants of its own.
_VECTORS = ["q_rows", "tokens", "parents", "lengths", "first_rows", "seeds", "positions"]


@triton.jit
def _log_mass(row, num_tokens, BLOCK: tl.constexpr):
    """(maximum, log of the sum relative to it) of the logits at `row`. Each lane sums its columns:
    the loop reduces nothing."""
    tops = tl.full([BLOCK], MINUS_INF, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, num_tokens, BLOCK, num_stages=_STAGES):
        columns = begin + tl.arange(0, BLOCK)
        x = clean(tl.load(row + columns, mask=columns < num_tokens, other=MINUS_INF))
        higher = tl.maximum(tops, x)
        totals = totals * tl.exp(tops - finite(higher)) + tl.exp(x - finite(higher))
        tops = higher
    return log_total(tops, totals)


@triton.jit
def _tried(columns, tokens, parents, node, begin, end):
    """Mask of columns that are tokens of children of `node` among the nodes `begin` .. `end` -
    1."""
    tried = columns < 0
    for other in range(begin, end):
        tried = tried | ((tl.load(parents + other) == node) & (columns == tl.load(tokens + other)))
    return tried


@triton.jit
def _left_over(
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
    begin,  # scalar
    end,  # scalar
    num_tokens,  # V
    HAS_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(mass left of p, log of what is left of the sum of q, relative to `q_top`) once some children
    are rejected.

    The second one is 0 where no q was given.
    """
    mass = tl.zeros([BLOCK], tl.float32)
    tops = tl.full([BLOCK], MINUS_INF, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    num_drawn = tl.where(is_drawn, num_tokens, 0)
    for start in range(0, num_tokens, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_tokens
        tried = _tried(columns, tokens, parents, node, begin, end)
        log_p = logprob(
            clean(tl.load(p_row + columns, mask=inside, other=MINUS_INF)), p_top, p_log_sum
        )
        if HAS_Q:
            q = clean(tl.load(q_row + columns, mask=columns < num_drawn, other=MINUS_INF)) - finite(
                q_top
            )
            left = tl.where(
                is_drawn, log_residual(log_p, q + log_scale), tl.where(tried, MINUS_INF, log_p)
            )
            q = tl.where(tried, MINUS_INF, q)
            higher = tl.maximum(tops, q)
            totals = totals * tl.exp(tops - finite(higher)) + tl.exp(q - finite(higher))
            tops = higher
        else:
            left = tl.where(tried, MINUS_INF, log_p)
        mass += tl.exp(left)
    top, log_sum = log_total(tops, totals)
    log_rest = top.to(tl.float64) + log_sum.to(tl.float64)
    return tl.sum(mass, axis=0).to(tl.float64), tl.where(is_drawn, log_rest, 0.0)


@triton.jit
def _log_add(a, b):
    """log(exp(a) + exp(b)) of float64 scalars; b is finite."""
    top = tl.maximum(a, b)
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit(do_not_specialize=["num_nodes"], do_not_specialize_on_alignment=_VECTORS)
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
    stands,  # [B, 2] int64: last node, its first tested child or -1, written
    scales,  # [B, 4] float32: p_top, p_log_sum, q_top, log A, written
    num_nodes,  # N
    num_tokens,  # V
    HAS_Q: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program b: the path that request b keeps, and in `stands` and `scales` what `_race` needs of
    the node where it ends."""
    b = tl.program_id(0).to(tl.int64)
    length, first = tl.load(lengths + b), tl.load(first_rows + b)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    tokens += b * num_nodes
    parents += b * num_nodes
    q_rows += b * (num_nodes + 1)
    columns = tl.arange(0, COLUMNS)
    path = tl.full([COLUMNS], -1, tl.int64)
    path_tokens = tl.full([COLUMNS], -1, tl.int64)
    kept = tl.zeros((), tl.int64)
    number = tl.zeros((), tl.int64)
    node = kept - 1
    begin = kept
    pending = kept > 0
    log_step = tl.zeros((), tl.float64)
    log_scale = log_step + MINUS_INF
    p_top = tl.zeros((), tl.float32)
    p_log_sum = p_top
    q_top = p_top
    for i in range(num_nodes):
        if (i < length) & (tl.load(parents + i) == node):
            token = tl.load(tokens + i)
            p_row = p_logits + (first + node + 1) * p_stride
            is_drawn = length < 0
            q_row = q_logits
            if HAS_Q:
                distribution = tl.load(q_rows + node + 1)
                is_drawn = distribution >= 0
                q_row = q_logits + tl.maximum(distribution, 0) * q_stride
            if number == 0:
                begin = number + i
                p_top, p_log_sum = _log_mass(p_row, num_tokens, BLOCK)
                if is_drawn:
                    q_top, q_log_sum = _log_mass(q_row, num_tokens, BLOCK)
                    log_step = -q_log_sum.to(tl.float64)
            q = tl.zeros((), tl.float32)
            if is_drawn:
                q = clean(tl.load(q_row + token, mask=token >= 0, other=MINUS_INF)) - finite(q_top)
            seen = _tried(token, tokens, parents, node, begin, i)
            if (token >= 0) & (q > MINUS_INF) & (seen == 0):
                if pending:
                    mass, log_rest = _left_over(
                        p_row,
                        p_top,
                        p_log_sum,
                        q_row,
                        q_top,
                        is_drawn,
                        log_scale.to(tl.float32),
                        tokens,
                        parents,
                        node,
                        begin,
                        i,
                        num_tokens,
                        HAS_Q,
                        BLOCK,
                    )
                    # Without mass left, which only rounding can bring about, p starts anew.
                    log_scale = tl.where(mass > 0, log_scale, MINUS_INF)
                    log_step = tl.log(tl.where(mass > 0, mass, 1.0)) - log_rest
                log_p = logprob(clean(tl.load(p_row + token)), p_top, p_log_sum)
                left = log_residual(log_p, q + log_scale.to(tl.float32)).to(tl.float64)
                log_u = tl.log(uniform(stream_key(seed, position + kept, ACCEPT), number))
                if log_u + q.to(tl.float64) + log_step < left:
                    path = tl.where(columns == kept, i, path)
                    path_tokens = tl.where(columns == kept, token, path_tokens)
                    kept += 1
                    node = kept * 0 + i
                    number = kept * 0 - 1
                    pending = kept < 0
                    log_step = log_step * 0
                    log_scale = log_step + MINUS_INF
                else:
                    pending = kept >= 0
                    if is_drawn:
                        log_scale = _log_add(log_scale, log_step)
            number += 1
    tl.store(accepted + b, kept)
    tl.store(nodes + b * num_nodes + columns, path, mask=columns < num_nodes)
    tl.store(drafts + b * num_nodes + columns, path_tokens, mask=columns < num_nodes)
    tl.store(stands + b * 2, node)
    tl.store(stands + b * 2 + 1, tl.where(number > 0, begin, -1))
    tl.store(scales + b * 4, p_top)
    tl.store(scales + b * 4 + 1, p_log_sum)
    tl.store(scales + b * 4 + 2, q_top)
    tl.store(scales + b * 4 + 3, log_scale.to(tl.float32))


@triton.jit(do_not_specialize=["num_nodes"], do_not_specialize_on_alignment=_VECTORS)
def _race(
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
    accepted,  # [B] int64
    stands,  # [B, 2] int64: last node, its first tested child or -1
    scales,  # [B, 4] float32: p_top, p_log_sum, q_top, log A
    scores,  # [B, blocks, 2] float64, written
    winners,  # [B, blocks, 2] int32, written
    num_nodes,  # N
    num_tokens,  # V
    num_blocks,
    HAS_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (b, block): the best token of the block for what is left of p (slot 0) and for p
    itself (slot 1, the fallback)."""
    b = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    node, begin = tl.load(stands + b * 2), tl.load(stands + b * 2 + 1)
    p_top, p_log_sum = tl.load(scales + b * 4), tl.load(scales + b * 4 + 1)
    q_top, log_scale = tl.load(scales + b * 4 + 2), tl.load(scales + b * 4 + 3)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    row = tl.load(first_rows + b) + node + 1
    p = clean(tl.load(p_logits + row * p_stride + columns, mask=inside, other=MINUS_INF))
    purpose = tl.where(begin >= 0, RESIDUAL, BONUS)
    noise = log_noise(
        stream_key(tl.load(seeds + b), tl.load(positions + b) + tl.load(accepted + b), purpose),
        columns,
    )
    distribution = p
    if begin >= 0:
        q_row = begin * 0 - 1
        if HAS_Q:
            q_row = tl.load(q_rows + b * (num_nodes + 1) + node + 1)
        if q_row < 0:
            place = b * num_nodes
            tried = _tried(
                columns, tokens + place, parents + place, node, begin, tl.load(lengths + b)
            )
            distribution = tl.where(tried, MINUS_INF, p)
        else:
            q = clean(tl.load(q_logits + q_row * q_stride + columns, mask=inside, other=MINUS_INF))
            distribution = log_residual(
                logprob(p, p_top, p_log_sum), (q - finite(q_top)) + log_scale
            )
    keep_best(distribution, noise, scores, winners, b, block, num_blocks, 0, BLOCK)
    keep_best(p, noise, scores, winners, b, block, num_blocks, 1, BLOCK)


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
    p_logits = contiguous_rows(p_logits)
    # Without draft distributions the kernels get p and the parents in their places and never read
    # them.
    has_q = q_logits is not None and q_rows is not None
    q_logits = contiguous_rows(q_logits) if q_logits is not None else p_logits
    q_rows = q_rows.contiguous() if q_rows is not None else parents
    distributions = (p_logits, p_logits.stride(0), q_logits, q_logits.stride(0), q_rows)
    requests = (tokens, parents, lengths, first_rows, seeds, positions)
    nodes, drafts, stands = (
        torch.empty(num_requests, width, dtype=torch.int64, device=device)
        for width in (num_nodes, num_nodes, 2)
    )
    accepted = torch.empty(num_requests, dtype=torch.int64, device=device)
    scales = torch.empty(num_requests, 4, dtype=torch.float32, device=device)
    scores = torch.empty(num_requests, num_blocks, 2, dtype=torch.float64, device=device)
    winners = torch.empty(num_requests, num_blocks, 2, dtype=torch.int32, device=device)
    output = torch.empty(num_requests, num_nodes + 1, dtype=torch.int64, device=device)
    if num_requests:
        columns = max(_FEWEST_NODES, triton.next_power_of_2(num_nodes + 1))
        _walk[(num_requests,)](
            *distributions,
            *requests,
            nodes,
            drafts,
            accepted,
            stands,
            scales,
            num_nodes,
            num_tokens,
            HAS_Q=has_q,
            COLUMNS=columns,
            BLOCK=block,
            num_warps=16,
        )
        _race[(num_requests, num_blocks)](
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
