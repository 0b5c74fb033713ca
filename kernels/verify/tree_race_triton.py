"""The token that a tree's walk ends with, in Triton: one program per block of a deciding row races
for it, one per request writes the row of output tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from draftsmith.kernels.sampling.draw_triton import winner
from draftsmith.kernels.sampling.filters_triton import MINUS_INF, clean
from draftsmith.kernels.sampling.random_streams_triton import BONUS, RESIDUAL, log_noise, stream_key
from draftsmith.kernels.verify.rows_triton import finite, log_residual, logprob

NUM_STANDS = tl.constexpr(6)  # numbers of a walk, see `tree_triton._decide`
# What differs from round to round makes no variants of its own.
VECTORS = ["q_rows", "tokens", "parents", "lengths", "first_rows", "seeds", "positions"]


@triton.jit
def is_tried(columns, tokens, parents, node, begin, end):
    """Mask of columns that are tokens of children of `node` among the nodes `begin` .. `end` -
    1."""
    found = columns < 0
    for other in range(begin, end):
        found = found | ((tl.load(parents + other) == node) & (columns == tl.load(tokens + other)))
    return found


@triton.jit(do_not_specialize=["num_nodes"], do_not_specialize_on_alignment=VECTORS)
def tree_race(
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
    stands,  # [B, NUMBERS] int64: last node, its first tested child or -1
    scales,  # [B, 4] float32: p_top, p_log_sum, q_top, log A
    scores,  # [B, 2, blocks] float64, written
    winners,  # [B, 2, blocks] int32, written
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
    node, begin = tl.load(stands + b * NUM_STANDS), tl.load(stands + b * NUM_STANDS + 1)
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
            tested = is_tried(
                columns, tokens + place, parents + place, node, begin, tl.load(lengths + b)
            )
            distribution = tl.where(tested, MINUS_INF, p)
        else:
            q = clean(tl.load(q_logits + q_row * q_stride + columns, mask=inside, other=MINUS_INF))
            distribution = log_residual(
                logprob(p, p_top, p_log_sum), (q - finite(q_top)) + log_scale
            )
    keep_best(distribution, noise, scores, winners, b, block, num_blocks, 0, BLOCK)
    keep_best(p, noise, scores, winners, b, block, num_blocks, 1, BLOCK)


@triton.jit
def keep_best(
    distribution,  # [BLOCK] logits
    noise,  # [BLOCK] log noise
    scores,  # [B, 2, blocks] float64, written
    winners,  # [B, 2, blocks] int32, written
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
    place = (b * 2 + slot) * num_blocks + block
    tl.store(scores + place, best.to(tl.float64) + top.to(tl.float64))
    tl.store(winners + place, block * BLOCK + at)


@triton.jit(do_not_specialize=["num_draft"], do_not_specialize_on_alignment=["draft_tokens"])
def emit(
    draft_tokens,  # [B, K] int64
    accepted,  # [B] int64
    scores,  # [B, 2, blocks] float64
    winners,  # [B, 2, blocks] int32
    tokens,  # [B, K + 1] int64, written
    num_draft,  # K
    num_blocks,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program b writes row b of the output: kept drafts, the winner, -1."""
    b = tl.program_id(0).to(tl.int64)
    kept = tl.load(accepted + b)
    token = winner(scores, winners, b * 2, num_blocks, BLOCKS)
    token = tl.where(token < 0, winner(scores, winners, b * 2 + 1, num_blocks, BLOCKS), token)
    columns = tl.arange(0, COLUMNS)
    drafts = tl.load(draft_tokens + b * num_draft + columns, mask=columns < kept, other=-1)
    output = tl.where(columns == kept, token.to(tl.int64), drafts)
    tl.store(tokens + b * (num_draft + 1) + columns, output, mask=columns <= num_draft)
