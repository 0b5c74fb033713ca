"""Processed distributions and draws in Triton: without an order of the vocabulary, a look at a
value or a shape that depends on one, so that a CUDA graph can hold them.

1. `_scale`, one program per block of a row: divides by temperature; keeps the maxima of groups of
   tokens of filtered rows, and runs the race of the others.
2. `_bound`, one program per filtered row: a number that its cut does not lie below.
3. `_narrow`, one program per block of a filtered or greedy row: lays the tokens side by side that
   the bound leaves of a filtered row, makes a greedy one one-hot.
4. `_finish`, one program per row: filters what `_narrow` has left and runs its race; otherwise
   finds the winner of the blocks.

`filter_cuts` writes no rows: a reader of logits masks them by what `_finish` found.
`draw.draw` has the reference. Tokens and filtered sets are its own but for float32 rounding:
of exponentials where a mass reaches 1 - top_p nearly, of logarithms where two tokens arrive at
nearly the same time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftsmith.kernels.dispatch import on_its_device, side_by_side
from draftsmith.kernels.sampling.draw import Drawn
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.filters_triton import (
    MINUS_INF,
    bound_of,
    clean,
    filter_row,
    is_kept,
    tempered,
    tile,
)
from draftsmith.kernels.sampling.random_streams import Purpose, first_arrivals
from draftsmith.kernels.sampling.random_streams_triton import log_noise, stream_key

BLOCK = 4096
GROUP = 64
TILE = 2048  # tokens of a step of a program that filters a row
# Of programs that lay tokens side by side, and that filter a row. Left to itself the assembler
# takes more registers for the first, so that one alone has room, and spills those of the second.
NARROWING = {"num_warps": 16, "maxnreg": 64}
FILTERING = {"num_warps": 4, "maxnreg": 168}
# What differs from call to call makes no variants of its own: parts of a batch begin anywhere.
_VECTORS = ["temperature", "top_k", "top_p", "min_p", "seeds", "positions"]

Streams = tuple[torch.Tensor, torch.Tensor, int]  # seeds [N] and positions [N] int64, a purpose


@triton.jit
def _is_filtered(row, temperature, top_k, top_p, min_p):
    wanted = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0)
    return wanted & (tl.load(temperature + row) != 0)


@triton.jit
def winner(scores, winners, row, num_blocks, BLOCKS: tl.constexpr):
    """The best block's token; -1 when every score is -inf."""
    blocks = tl.arange(0, BLOCKS)
    best = tl.load(scores + row * num_blocks + blocks, mask=blocks < num_blocks, other=MINUS_INF)
    score, at = tl.max(best, axis=0, return_indices=True)
    return tl.where(score == MINUS_INF, -1, tl.load(winners + row * num_blocks + at))


@triton.jit(do_not_specialize=["purpose"], do_not_specialize_on_alignment=_VECTORS)
def _scale(
    logits,  # [N, V]
    stride,  # of a row of logits
    temperature,  # [N] float32
    top_k,  # [N] int64
    top_p,  # [N] float64
    min_p,  # [N] float32
    seeds,  # [N] int64
    positions,  # [N] int64
    purpose,
    processed,  # [N, V] float32, written
    scores,  # [N, blocks] float32, written
    winners,  # [N, blocks] int32, written
    maxima,  # [N, groups] float32, written
    num_tokens,  # V
    num_blocks,
    FILTERED: tl.constexpr,
    WRITTEN: tl.constexpr,
    DRAWN: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program (row, block). `FILTERED`: some row may be. `WRITTEN`: processed logits are asked for.
    Not `DRAWN`: the winners are the likeliest tokens, seeds and positions are not read."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    raced = True
    if FILTERED:
        raced = not _is_filtered(row, temperature, top_k, top_p, min_p)
        # Of a row that keeps all, cuts need nothing.
        if raced and not WRITTEN:
            return
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    x = clean(tl.load(logits + row * stride + columns, mask=inside, other=MINUS_INF))
    degree = tl.load(temperature + row)
    if FILTERED:  # noqa: SIM102
        if not raced:
            # The largest of the quotients is the quotient of the largest.
            tops = tempered(tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), axis=1), degree)
            places = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            tl.store(maxima + row * num_blocks * (BLOCK // GROUP) + places, tops)
    if WRITTEN:  # noqa: SIM102
        if raced:
            x = tempered(x, degree)
            if degree != 0:
                tl.store(processed + row * num_tokens + columns, x, mask=inside)
                if DRAWN:
                    key = stream_key(tl.load(seeds + row), tl.load(positions + row), purpose)
                    x -= log_noise(key, columns)
            best, at = tl.max(x, axis=0, return_indices=True)
            tl.store(scores + row * num_blocks + block, best)
            tl.store(winners + row * num_blocks + block, block * BLOCK + at)


@triton.jit(do_not_specialize_on_alignment=_VECTORS[:4])
def _bound(
    temperature,  # [N] float32
    top_k,  # [N] int64
    top_p,  # [N] float64
    min_p,  # [N] float32
    maxima,  # [N, groups] float32
    bounds,  # [N, 2] float32, written: maximum, number that no filter's cut lies below
    num_tokens,  # V
    num_groups,
    GROUPS: tl.constexpr,
):
    """Program (row), of filtered rows."""
    row = tl.program_id(0).to(tl.int64)
    if _is_filtered(row, temperature, top_k, top_p, min_p):
        lanes = tl.arange(0, GROUPS)
        places = maxima + row * num_groups + lanes
        groups = tl.load(places, mask=lanes < num_groups, other=MINUS_INF)
        top = tl.max(groups, axis=0)
        bound = top
        if top > MINUS_INF:
            options = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
            bound = bound_of(groups, *options, num_tokens, GROUPS)
        tl.store(bounds + 2 * row, top)
        tl.store(bounds + 2 * row + 1, bound)


@triton.jit(do_not_specialize_on_alignment=_VECTORS[:4])
def _narrow(
    logits,  # [N, V]
    stride,  # of a row of logits
    temperature,  # [N] float32
    top_k,  # [N] int64
    top_p,  # [N] float64
    min_p,  # [N] float32
    processed,  # [N, V] float32, written
    scores,  # [N, blocks] float32
    winners,  # [N, blocks] int32
    bounds,  # [N, 2] float32
    values,  # [N, blocks, BLOCK] float32, written
    ids,  # [N, blocks, BLOCK] int32, written
    sizes,  # [N, blocks] int32, written
    masses,  # [N, blocks] float32, written: of what is not laid down
    num_tokens,  # V
    num_blocks,
    FILTERED: tl.constexpr,
    WRITTEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (row, block)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    output = processed + row * num_tokens + columns
    degree = tl.load(temperature + row)
    if WRITTEN:  # noqa: SIM102
        if degree == 0:
            token = winner(scores, winners, row, num_blocks, BLOCKS)
            tl.store(output, tl.where(columns == token, 0.0, MINUS_INF), mask=inside)
    if FILTERED:  # noqa: SIM102
        if _is_filtered(row, temperature, top_k, top_p, min_p):
            top, bound = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
            x = tl.load(logits + row * stride + columns, mask=inside, other=MINUS_INF)
            x = tempered(x, degree)
            if WRITTEN:
                tl.store(output, tl.where(x >= bound, x, MINUS_INF), mask=inside)
            if top > MINUS_INF:
                left = inside & (x >= bound)
                place = row * num_blocks + block
                tl.store(masses + place, tl.sum(tl.where(left, 0.0, tl.exp(x - top)), axis=0))
                tl.store(sizes + place, tl.sum(left.to(tl.int32), axis=0))
                places = tl.cumsum(left.to(tl.int32), axis=0) - 1
                tl.store(values + place * BLOCK + places, x, mask=left)
                tl.store(ids + place * BLOCK + places, columns, mask=left)


@triton.jit(do_not_specialize=["purpose"], do_not_specialize_on_alignment=[*_VECTORS, "results"])
def _finish(
    temperature,  # [N] float32
    top_k,  # [N] int64
    top_p,  # [N] float64
    min_p,  # [N] float32
    seeds,  # [N] int64
    positions,  # [N] int64
    purpose,
    processed,  # [N, V] float32, written
    scores,  # [N, blocks] float32
    winners,  # [N, blocks] int32
    bounds,  # [N, 2] float32
    values,  # [N, blocks, BLOCK] float32
    ids,  # [N, blocks, BLOCK] int32
    sizes,  # [N, blocks] int32
    masses,  # [N, blocks] float32
    results,  # written: [N] int64 tokens where `WRITTEN`, otherwise [N, 2] int32 cuts
    num_tokens,  # V
    num_blocks,
    FILTERED: tl.constexpr,
    WRITTEN: tl.constexpr,
    DRAWN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    raced = True
    # Below the key of -inf: all is kept.
    cut, first_id = tl.full((), -0x80000000, tl.int32), tl.zeros((), tl.int32)
    if FILTERED:
        raced = not _is_filtered(row, temperature, top_k, top_p, min_p)
        if not raced:
            top, bound = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
            token = tl.full((), -1, tl.int32)
            if top > MINUS_INF:
                options = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
                blocks = tl.arange(0, BLOCKS)
                real = blocks < num_blocks
                place = row * num_blocks
                own_sizes = tl.load(sizes + place + blocks, mask=real, other=0)
                mass = tl.load(masses + place + blocks, mask=real, other=0.0)
                base = tl.sum(mass.to(tl.float64), axis=0)
                own_values, own_ids = values + place * BLOCK, ids + place * BLOCK
                cut, first_id = filter_row(
                    own_values, own_ids, own_sizes, num_tokens, top, bound, base, *options,
                    BLOCK, BLOCKS, PART,
                )  # fmt: skip
                if WRITTEN:
                    key = tl.zeros((), tl.int64)
                    if DRAWN:
                        key = stream_key(tl.load(seeds + row), tl.load(positions + row), purpose)
                    token = _race(
                        processed + row * num_tokens, own_values, own_ids, own_sizes, cut,
                        first_id, key, DRAWN, BLOCK, BLOCKS, PART,
                    )  # fmt: skip
            if WRITTEN:
                tl.store(results + row, token.to(tl.int64))
    if not WRITTEN:
        tl.store(results + 2 * row, cut)
        tl.store(results + 2 * row + 1, first_id)
    elif raced:
        token = winner(scores, winners, row, num_blocks, BLOCKS)
        tl.store(results + row, token.to(tl.int64))


@triton.jit
def _race(
    logits,  # [V] float32 of the row, written: -inf for what is not kept
    values,  # [blocks, BLOCK] float32
    ids,  # [blocks, BLOCK] int32
    sizes,  # [BLOCKS] int32
    cut,
    first_id,
    key,
    DRAWN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
):
    """The winner among the tokens that all filters keep; the lowest of equal ones."""
    best, token = tl.full((), float("-inf"), tl.float32), tl.full((), -1, tl.int32)
    for start in range(0, tl.max(sizes, axis=0), PART):
        x, inside = tile(values, sizes, start, MINUS_INF, BLOCK, BLOCKS, PART)
        own, _ = tile(ids, sizes, start, 0, BLOCK, BLOCKS, PART)
        stays = inside & is_kept(x, own, cut, first_id)
        tl.store(logits + own, MINUS_INF, mask=inside & (stays == 0))
        if DRAWN:
            x = tl.where(stays, x - log_noise(key, own), MINUS_INF)
            score = tl.max(tl.max(x, axis=1), axis=0)
            first = tl.min(tl.min(tl.where(x == score, own, 0x7FFFFFFF), axis=1), axis=0)
            ahead = (score > best) | ((score == best) & (first < token))
            token = tl.where(ahead, first, token)
            best = tl.maximum(score, best)
    return token


@triton.jit(do_not_specialize=["purpose"], do_not_specialize_on_alignment=["seeds", "positions"])
def _score(
    processed,  # [N, V] float32
    stride,  # of a row of processed
    seeds,  # [N] int64
    positions,  # [N] int64
    purpose,
    scores,  # [N, V] float32, written
    num_tokens,  # V
    BLOCK: tl.constexpr,
):
    """Program (row, block): what a race compares."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    x = tl.load(processed + row * stride + columns, mask=inside, other=MINUS_INF)
    key = stream_key(tl.load(seeds + row), tl.load(positions + row), purpose)
    tl.store(scores + row * num_tokens + columns, x - log_noise(key, columns), mask=inside)


@on_its_device
def draw_several_triton(
    processed: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    count: int,
) -> torch.Tensor:
    """`draw.draw_several`."""
    num_rows, num_tokens = processed.shape
    processed = side_by_side(processed)
    scores = torch.empty(processed.shape, dtype=torch.float32, device=processed.device)
    block = min(BLOCK, triton.next_power_of_2(num_tokens))
    if num_rows:
        _score[(num_rows, triton.cdiv(num_tokens, block))](
            processed,
            processed.stride(0),
            seeds.contiguous(),
            positions.contiguous(),
            int(purpose),
            scores,
            num_tokens,
            BLOCK=block,
            num_warps=8,
        )
    return first_arrivals(scores, count)


def process_triton(logits: torch.Tensor, rows: SamplingRows, *, block: int = BLOCK) -> torch.Tensor:
    """`filters.process`; `block` tokens of the vocabulary per program."""
    return _launch(logits, rows, None, block).logits


def draw_triton(
    logits: torch.Tensor,
    rows: SamplingRows,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    *,
    block: int = BLOCK,
) -> Drawn:
    """`draw.draw`; `block` tokens of the vocabulary per program."""
    return _launch(logits, rows, (seeds, positions, int(purpose)), block)


def filter_cuts(logits: torch.Tensor, rows: SamplingRows, *, block: int = BLOCK) -> torch.Tensor:
    """[N, 2] int32 by which `is_kept` masks rows of logits [N, V] once divided by temperature: the
    key of a row's cut, and the least id. A greedy row keeps all."""
    return _launch(logits, rows, None, block, written=False).tokens


@on_its_device
def _launch(
    logits: torch.Tensor,
    rows: SamplingRows,
    streams: Streams | None,
    block: int,
    *,
    written: bool = True,
) -> Drawn:
    """Cuts in place of tokens and no logits where not `written`."""
    options, greedy, filtered = rows.options, rows.passes.greedy, rows.passes.filtered
    num_rows, num_tokens = logits.shape
    block = min(block, max(triton.next_power_of_2(num_tokens), 2))
    group = min(GROUP, block // 2)
    num_blocks = triton.cdiv(num_tokens, block)
    num_groups = num_blocks * (block // group)
    blocks = triton.next_power_of_2(num_blocks)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    whole = torch.int32
    processed = empty(num_tokens if written else 1)
    results = empty(dtype=torch.int64) if written else empty(2, dtype=whole)
    if num_rows == 0:
        return Drawn(results, processed)
    logits = side_by_side(logits)
    # Without streams nothing is read of what stands in their place; without filters neither of
    # maxima and what is laid side by side.
    seeds, positions, purpose = (options[1], options[1], 0) if streams is None else streams
    vectors = [tensor.contiguous() for tensor in (*options, seeds, positions)]
    group_room, room = (num_groups, num_blocks * block) if filtered else (1, 1)
    best = (processed, empty(num_blocks), empty(num_blocks, dtype=whole))
    maxima, bounds = empty(group_room), empty(2)
    left = (
        bounds,
        empty(room),
        empty(room, dtype=whole),
        empty(num_blocks, dtype=whole),
        empty(num_blocks),
    )
    drawn, sizes = streams is not None, (num_tokens, num_blocks)
    flags = {"FILTERED": filtered, "WRITTEN": written, "BLOCK": block}
    given = (logits, logits.stride(0), *vectors[:4])
    _scale[(num_rows, num_blocks)](
        *given,
        *vectors[4:],
        purpose,
        *best,
        maxima,
        *sizes,
        **flags,
        DRAWN=drawn,
        GROUP=group,
        num_warps=8,
    )
    if filtered:
        groups = triton.next_power_of_2(num_groups)
        _bound[(num_rows,)](
            *vectors[:4], maxima, bounds, num_tokens, num_groups, GROUPS=groups, num_warps=4
        )
    flags["BLOCKS"] = blocks
    if filtered or (greedy and written):
        _narrow[(num_rows, num_blocks)](*given, *best, *left, *sizes, **flags, **NARROWING)
    if drawn or filtered:
        _finish[(num_rows,)](
            *vectors,
            purpose,
            *best,
            *left,
            results,
            *sizes,
            **flags,
            DRAWN=drawn,
            PART=max(min(block, TILE) // blocks, 1),
            **(FILTERING if filtered else {"num_warps": 1}),
        )
    return Drawn(results, processed)
