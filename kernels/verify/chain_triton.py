"""Chain verification in Triton, of raw logits or of processed ones: temperature, tests, residuals
and draws in three launches, which read the distributions once and the deciding rows once more.

1. `row_stats`: maximum and sum of exponentials of every block of every row.
2. `_decide`: one program a request: which drafted tokens stand, and what to draw from. A greedy
  request is over.
3. `race`: one program a block of each deciding row; log of max(p - q, 0), or of p, minus log E.

No buffer of size [rows, V] is made; what is kept is O(rows x blocks). Legend as in `chain.py`; D of
the B requests have drafted tokens, and come first.
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
    stream_key,
    uniform,
)
from draftsmith.kernels.verify.chain import no_drafts, owners
from draftsmith.kernels.verify.race_triton import race_rows, settle
from draftsmith.kernels.verify.rows_triton import (
    NUM_SCALES,
    at_depth,
    first_row,
    logprob,
    measure_rows,
    normalisers,
    rows_of,
    target_logits,
    temperature_of,
)
from draftsmith.kernels.verify.verdict import Drafts, Verdict

BLOCK = 4096


@triton.jit(
    do_not_specialize=["num_drafting", "num_draft"],
    do_not_specialize_on_alignment=[
        "temperatures", "cuts", "draft_tokens", "lengths", "owned", "seeds", "positions",
    ],
)  # fmt: skip
def _decide(
    logits,  # [R, V]
    stride,  # of a row of logits
    temperatures,  # [B] float32, 0 is greedy; or None
    cuts,  # as `target_logits` takes them
    q_logits,  # [D * K, V] processed
    q_stride,  # of a row of q_logits
    draft_tokens,  # [D, K] int64
    lengths,  # [D] int64
    owned,  # as `first_row` takes it
    seeds,  # [B] int64
    positions,  # [B] int64
    maxima,  # [2 (p, q), B, K + 1, blocks] float32
    sums,  # [2, B, K + 1, blocks] float32
    places,  # [B, K + 1, blocks] int32
    choices,  # [B, NUM_CHOICES] int64, written
    scales,  # [B, NUM_SCALES] float32, written
    raced,  # [B] int32, written
    verdicts,  # [B, K + 2] int64, written
    num_drafting,  # D
    num_draft,  # K
    num_blocks,
    HAS_Q: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPTHS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Program b. All depths are tested at once; those before the first one that fails are kept."""
    b = tl.program_id(0).to(tl.int64)
    depths = tl.arange(0, DEPTHS)
    length = tl.load(lengths + b, mask=b < num_drafting, other=0)
    first = first_row(owned, b, num_drafting, REQUESTS)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    temperature = temperature_of(temperatures, b)
    tokens = tl.load(draft_tokens + b * num_draft + depths, mask=depths < length, other=-1)
    offered = tokens >= 0
    p_rows = b * (num_draft + 1) + depths
    top, log_sum, top_block = normalisers(
        maxima, sums, p_rows, depths <= length, num_blocks, BLOCKS
    )
    own = first + tl.where(offered, depths, 0)
    x = target_logits(logits, stride, cuts, own, tokens, offered, temperature)
    log_p = logprob(x, top, log_sum)
    likeliest = tl.full([DEPTHS], -1, tl.int32)
    if temperature == 0:
        likeliest = tl.load(
            places + p_rows * num_blocks + top_block,
            mask=(depths <= length) & (top > MINUS_INF), other=-1,
        )  # fmt: skip
        log_p = tl.where(tokens == likeliest, 0.0, MINUS_INF)
    log_q = tl.zeros([DEPTHS], tl.float32)
    q_top, q_log_sum = log_q, log_q
    if HAS_Q:
        q_rows = tl.num_programs(0) * (num_draft + 1) + p_rows
        q_top, q_log_sum, _ = normalisers(maxima, sums, q_rows, depths < length, num_blocks, BLOCKS)
        x = tl.load(
            q_logits + (b * num_draft + depths) * q_stride + tokens, mask=offered, other=MINUS_INF
        )
        log_q = logprob(clean(x), q_top, q_log_sum)
    log_u = tl.log(uniform(stream_key(seed, position + depths, ACCEPT), 0))
    keep = offered & (log_u + log_q.to(tl.float64) < log_p.to(tl.float64))
    keep = keep & (log_q > MINUS_INF)
    kept = tl.min(tl.where(keep, DEPTHS, depths), axis=0).to(tl.int64)
    rejected = kept < length
    q_row, q_token = kept * 0 - 1, tl.max(tl.where(depths == kept, tokens, -1), axis=0)
    if HAS_Q:
        # A token that q could not have drawn is no draft: as if q had no mass, p answers.
        drawn = at_depth(log_q, depths, kept) > MINUS_INF
        q_row = tl.where(rejected & drawn, b * num_draft + kept, -1)
        q_token = kept * 0 - 1
    settle(
        choices, raced, verdicts, b, kept, tokens,
        tl.max(tl.where(depths == kept, likeliest, -1), axis=0),
        tl.where(temperature == 0, -1, first + kept), q_row, q_token,
        stream_key(seed, position + kept, tl.where(rejected, RESIDUAL, BONUS)),
        rejected, num_draft, depths,
    )  # fmt: skip
    scales += b * NUM_SCALES
    tl.store(scales, at_depth(top, depths, kept))
    tl.store(scales + 1, at_depth(log_sum, depths, kept))
    tl.store(scales + 2, at_depth(q_top, depths, kept))
    tl.store(scales + 3, at_depth(q_log_sum, depths, kept))
    tl.store(scales + 4, 0.0)


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
    drafts = Drafts(draft_tokens, lengths, q_logits, lengths if sizes is None else sizes)
    verdicts = verify_tempered(p_logits, None, drafts, seeds, positions, block=block)
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
    temperatures: torch.Tensor | None,
    drafts: Drafts,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    cuts: torch.Tensor | None = None,
    block: int | None = None,
) -> torch.Tensor:
    """As `verify_logits_triton`, of temperatures [B] float32 and the cuts of `filter_cuts` where a
    row is filtered, or of processed logits."""
    num_drafting, num_draft = drafts.tokens.shape
    rows = rows_of(logits, temperatures, cuts, drafts, len(seeds), block or BLOCK)
    if rows.num_requests:
        measure_rows(rows)
        _decide[(rows.num_requests,)](
            *rows.distributions,
            rows.tokens,
            rows.lengths,
            rows.owned,
            seeds.contiguous(),
            positions.contiguous(),
            *rows.stats,
            *rows.decision,
            num_drafting,
            num_draft,
            rows.num_blocks,
            HAS_Q=rows.has_q,
            **rows.paddings,
            REQUESTS=rows.summed,
            num_warps=4,
        )
        race_rows(rows)
    return rows.verdicts
