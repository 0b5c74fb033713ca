"""Paged attention in Triton, one kernel for prompt pieces, chains, trees and single tokens of any
mix of rows.

`_attend`, program (tile, kv head, split): a tile is some tokens of one row times the query heads
that share the kv head, so that each key is read once for all of them; more heads than a tile holds
are several parts. A split is a share of the row's context (flash decoding). Softmax runs online.
The last program of a tile's splits puts them together.

The tokens that a token sees are worked out from positions, kv indices and ancestor bits block by
block: no mask is stored. All sizes of a launch come from the shapes of tensors, never from their
values: nothing waits for the device, a CUDA graph can hold the pass. `paged_torch.py` is the
reference. Legend as in `paged.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from draftsmith.kernels.attention.lay_out_triton import lay_out, row_bucket
from draftsmith.kernels.attention.pool import Chunk, Scoring, size_of
from draftsmith.kernels.attention.tiles import HeadKind, Widths, choose_tiles, limits_of
from draftsmith.kernels.dispatch import on_its_device, side_by_side

if TYPE_CHECKING:
    from draftsmith.kernels.attention.pool import PassLayout, TreeLayout

_LOG2E = tl.constexpr(1.4426950408889634)
_MINUS_INF = tl.constexpr(float("-inf"))
_FAR = tl.constexpr(1 << 30)  # a kv index beyond every context

# A split shorter than this costs more in merging than it gains.
_SHORTEST_SPLIT = 64
_MOST_SPLITS = 64
# Programs that every multiprocessor should have.
_PROGRAMS = 2


@triton.jit
def _num_bits(x):
    """Set bits of non-negative int64 numbers."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x + (x >> 32)) & 0x7F


@triton.jit
def _queries(
    lanes,
    begin_token,
    end,
    kv_head,
    part,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """(token, head, whether there is one) of each lane of a tile."""
    tokens = begin_token + lanes // SHARE
    group = part * SHARE + lanes % SHARE
    real = (lanes < TILE * SHARE) & (tokens < end) & (group < GROUPS)
    return tokens, kv_head * GROUPS + group, real


@triton.jit
def _merged(
    parts,
    maxima,
    sums,
    places,  # [QUERIES], of the tile in the first split
    real,  # [QUERIES]
    num_splits,
    step,  # from split to split
    dims,
    VALUE_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """(sum of values [QUERIES, VALUE_WIDTH], sum of weights [QUERIES]) of all splits, added up in
    their order."""
    AT_ONCE: tl.constexpr = 4096 // (QUERIES * VALUE_WIDTH) + 1  # splits on their way
    top = tl.full((QUERIES,), _MINUS_INF, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    gathered = tl.zeros((QUERIES, VALUE_WIDTH), tl.float32)
    for begin in range(0, num_splits, AT_ONCE):
        for index in tl.static_range(AT_ONCE):
            mask, at = real & (begin + index < num_splits), (begin + index) * step
            one_top = tl.load(
                maxima + at + places, mask=mask, other=_MINUS_INF, cache_modifier=".cg"
            )
            one_total = tl.load(sums + at + places, mask=mask, other=0.0, cache_modifier=".cg")
            part = tl.load(
                parts + at * VALUE_DIM + (places[:, None] * VALUE_DIM + dims[None, :]),
                mask=mask[:, None] & (dims[None, :] < VALUE_DIM), other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_top = tl.maximum(top, one_top)
            shift = tl.where(new_top == _MINUS_INF, 0.0, new_top)
            decay, weight = tl.exp2(top - shift), tl.exp2(one_top - shift)
            gathered = gathered * decay[:, None] + part * weight[:, None]
            total = total * decay + one_total * weight
            top = new_top
    return gathered, total


# What differs from launch to launch of one server makes no variants of its own.
@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_splits", "table_stride", "window"],
    do_not_specialize_on_alignment=[
        "maxima", "sums", "tickets", "sinks", "block_tables", "starts", "positions", "kv_indices",
        "ancestors", "first",
    ],
)  # fmt: skip
def _attend(
    query,  # [heads, T, KEY_DIM]
    keys,  # [slots, KV_HEADS, KEY_DIM]
    values,  # [slots, KV_HEADS, VALUE_DIM]
    out,  # [T, heads, VALUE_DIM], written
    parts,  # [splits, T, heads, VALUE_DIM] float32, written
    maxima,  # [splits, T, heads] float32, written
    sums,  # [splits, T, heads] float32, written
    tickets,  # [tiles * KV_HEADS * PARTS] int64, zeros before and after
    sinks,  # [heads], or None
    block_tables,  # [B, max_blocks] int64
    starts,  # [B + 1] int64
    positions,  # [T] int64
    kv_indices,  # [T] int64
    ancestors,  # [T] int64; None without trees
    first,  # [T] int64; None without trees
    query_head_stride,
    query_token_stride,
    table_stride,
    num_tokens,  # T
    num_rows,  # B
    num_splits,
    scale,
    softcap,  # or None
    window,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,  # with a window, which is their size then
):
    """Attention of one tile of queries over one split of the context.

    A tile is `TILE` tokens times one of the `PARTS` of the `GROUPS` heads that share a kv head. The
    first `KEY_WIDTH` dimensions of keys and the `REST_WIDTH` after them are multiplied apart, so
    that a dimension like 576 is not padded to 1024; 0: there is no rest.

    With splits `parts` get the sums of each, `maxima` and `sums` what they are relative to (scores
    in units of log 2), and `out` what the last program makes of them.
    """
    SHARE: tl.constexpr = (GROUPS + PARTS - 1) // PARTS  # heads of a tile
    tile, split = tl.program_id(0), tl.program_id(2)
    kv_head, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    # Row b owns tiles from starts[b] // TILE + b on: always enough of them, and known without
    # asking anyone.
    every = tl.arange(0, ROWS)
    begins = tl.load(starts + every, mask=every < num_rows, other=_FAR)
    row = tl.sum((begins // TILE + every <= tile).to(tl.int32), axis=0) - 1
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    begin_token = begin + (tile - (begin // TILE + row)) * TILE
    if begin_token >= end:
        return

    lanes = tl.arange(0, QUERIES)
    tokens, heads, real = _queries(lanes, begin_token, end, kv_head, part, TILE, GROUPS, SHARE)
    # A context is shorter than 2^31, and scores are masked by these.
    position = tl.load(positions + tokens, mask=real, other=_FAR).to(tl.int32)
    kv_index = tl.load(kv_indices + tokens, mask=real, other=-1).to(tl.int32)
    context = tl.max(kv_index, axis=0) + 1
    nearest = tl.min(tl.where(real, kv_index, _FAR), axis=0)  # before it all queries see everything
    lowest = tl.zeros((), tl.int32)
    oldest = position - window + 1  # position that a query sees
    if HAS_CHUNKS:
        oldest = position // window * window
    if HAS_WINDOW:
        lowest = tl.maximum(tl.min(oldest, axis=0), 0)
        nearest = lowest
    share = tl.cdiv(tl.cdiv(context - lowest, num_splits), KEYS) * KEYS
    low = lowest + split * share
    if low >= context:  # a short context leaves most splits of a long table empty
        return
    high = tl.minimum(low + share, context)
    bits = tl.zeros((QUERIES,), tl.int64)
    root = tl.zeros((QUERIES,), tl.int32)
    nearest_root = tl.zeros((), tl.int32)
    if ancestors is not None:
        bits = tl.load(ancestors + tokens, mask=real, other=-1)
        # A token without a tree sees all up to its own index, as if its tree began beyond them.
        root = tl.load(first + tokens, mask=real, other=_FAR)
        root = tl.where(bits == -1, _FAR, root).to(tl.int32)
        nearest_root = tl.min(root, axis=0)
        nearest = tl.minimum(nearest, nearest_root)

    key_dims, value_dims = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    places_of_query = tokens * query_token_stride + heads * query_head_stride
    q = tl.load(
        query + places_of_query[:, None] + key_dims[None, :],
        mask=real[:, None] & (key_dims[None, :] < KEY_DIM),
        other=0.0,
    )
    if REST_WIDTH > 0:
        rest_dims = KEY_WIDTH + tl.arange(0, REST_WIDTH)
        q_rest = tl.load(
            query + places_of_query[:, None] + rest_dims[None, :],
            mask=real[:, None] & (rest_dims[None, :] < KEY_DIM),
            other=0.0,
        )
    top = tl.full((QUERIES,), _MINUS_INF, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    if sinks is not None:  # noqa: SIM102
        # A sink is a key without a value, seen by the first split. Nested, because one part is
        # decided when it is compiled.
        if split == 0:
            top = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * _LOG2E
            total = total + 1.0
    gathered = tl.zeros((QUERIES, VALUE_WIDTH), tl.float32)

    for begin_key in range(low, high, KEYS):
        at = begin_key + tl.arange(0, KEYS)
        inside = at < high
        block = tl.load(
            block_tables + row.to(tl.int64) * table_stride + at // BLOCK_SIZE, mask=inside, other=0
        )
        slot = (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE) * KV_HEADS + kv_head
        k = tl.load(
            keys + slot[None, :] * KEY_DIM + key_dims[:, None],
            mask=inside[None, :] & (key_dims[:, None] < KEY_DIM),
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if REST_WIDTH > 0:
            k_rest = tl.load(
                keys + slot[None, :] * KEY_DIM + rest_dims[:, None],
                mask=inside[None, :] & (rest_dims[:, None] < KEY_DIM),
                other=0.0,
            )
            scores = tl.dot(q_rest, k_rest.to(q.dtype), scores, input_precision="ieee")
        scores = scores * scale
        if softcap is not None:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        seen = inside[None, :] & (at[None, :] <= kv_index[:, None])
        place = tl.broadcast_to(at[None, :], (QUERIES, KEYS))  # its position
        if ancestors is not None:  # noqa: SIM102
            # Blocks before the trees, nearly all of a long context, need no bits.
            if begin_key + KEYS > nearest_root:
                index = at[None, :] - root[:, None]
                node = tl.minimum(tl.maximum(index, 0), 62)
                seen = seen & ((index < 0) | ((bits[:, None] >> node) & 1 == 1))
                if HAS_WINDOW:
                    # Positions of a path follow one another: the bits above an ancestor's count the
                    # steps to it.
                    above = (tl.maximum(bits[:, None], 0) >> node) >> 1
                    place = tl.where(
                        index < 0, place, position[:, None] - _num_bits(above).to(tl.int32)
                    )
        if HAS_WINDOW:
            seen = seen & (place >= oldest[:, None])
        scores = tl.where(seen, scores * _LOG2E, _MINUS_INF)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == _MINUS_INF, 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        v = tl.load(
            values + slot[:, None] * VALUE_DIM + value_dims[None, :],
            mask=inside[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        if begin_key + KEYS > nearest:
            # Behind a drafted token the target may overflow, and 0 * NaN is NaN: only queries that
            # see it may notice.
            finite = tl.abs(v) < float("inf")
            v = tl.where(finite, v, 0.0)
            spoiled = tl.min(finite.to(tl.int32), axis=1) == 0
            noticed = tl.max((seen & spoiled[None, :]).to(tl.int32), axis=1)
            gathered = tl.where((noticed > 0)[:, None], float("nan"), gathered)
        gathered = gathered * decay[:, None] + tl.dot(
            weights.to(q.dtype), v.to(q.dtype), input_precision="ieee"
        )
        total = total * decay + tl.sum(weights, axis=1)
        top = new_top

    # Worked out again, by a zero that is read so that no compiler folds it: kept through the loop
    # they would cost registers that it needs. Offsets from the tile's first place fit in 32 bits.
    lanes += (tl.load(starts + row, volatile=True) - begin).to(tl.int32)
    tokens, heads, real = _queries(lanes, begin_token, end, kv_head, part, TILE, GROUPS, SHARE)
    tile_place = begin_token.to(tl.int64) * (KV_HEADS * GROUPS)
    places = lanes // SHARE * (KV_HEADS * GROUPS) + heads
    offsets = places[:, None] * VALUE_DIM + value_dims[None, :]
    written = real[:, None] & (value_dims[None, :] < VALUE_DIM)
    if IS_SPLIT:
        step = num_tokens.to(tl.int64) * (KV_HEADS * GROUPS)  # from split to split
        maxima, sums, parts = (
            maxima + tile_place, sums + tile_place, parts + tile_place * VALUE_DIM
        )  # fmt: skip
        tl.store(maxima + split * step + places, top, mask=real)
        tl.store(sums + split * step + places, total, mask=real)
        tl.store(parts + split * step * VALUE_DIM + offsets, gathered, mask=written)
        # The barrier orders the stores of all threads before the count, which one thread releases.
        # Each count reads the one before it, so that the last acquires what all of them released;
        # it reaches the other threads behind a barrier, and what they load comes from L2, where the
        # stores are. No program waits, so the order in which a device starts them is free.
        tl.debug_barrier()
        ticket = tickets + tile * tl.num_programs(1) + tl.program_id(1)
        num_filled = tl.cdiv(context - lowest, share)
        if tl.atomic_add(ticket, 1, sem="acq_rel") < num_filled - 1:
            return
        tl.store(ticket, 0)  # for the next launch, another layer's or that of a graph's replay
        gathered, total = _merged(
            parts, maxima, sums, places, real, num_filled, step, value_dims, VALUE_DIM,
            QUERIES, VALUE_WIDTH,
        )  # fmt: skip
    result = gathered / tl.where(real, total, 1.0)[:, None]
    tl.store(out + tile_place * VALUE_DIM + offsets, result.to(out.dtype.element_ty), mask=written)


@dataclass(frozen=True)
class TritonContext:
    """Layout of one pass in the kernel's terms. Args as `PagedPass`; every tensor stays where it
    is."""

    block_size: int
    block_tables: torch.Tensor  # [B, max_blocks]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T]
    starts: torch.Tensor  # [B + 1], where each row starts in T
    tree: TreeLayout | None
    tickets: torch.Tensor  # zeros of this pass alone, `_PROGRAMS` for every multiprocessor
    num_splits: int | None = None  # None: enough to fill the device

    @classmethod
    def of(cls, block_size: int, layout: PassLayout) -> TritonContext:
        block_tables, positions, lengths, tree = layout
        # The kernel steps by one number, and a number that was expanded over a row has no step.
        if tree is not None:
            tree = type(tree)(*(part.contiguous() for part in tree))
        positions = positions.contiguous()
        kv_indices = positions if tree is None else tree.kv_indices
        num_tickets = _PROGRAMS * limits_of(lengths.device).num_multiprocessors
        slots, starts, tickets = lay_out(block_size, block_tables, kv_indices, lengths, num_tickets)
        return cls(block_size, block_tables, positions, slots, starts, tree, tickets)

    @on_its_device
    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        """query [1, heads, T, dim]; keys and values [S, kv_heads, dim], the pass's own among them
        -> [T, heads, value_dim]."""
        query = side_by_side(query)
        num_heads, num_tokens = query.shape[1], query.shape[2]
        (_, kv_heads, key_dim), value_dim = keys.shape, values.shape[2]
        num_rows, groups = len(self.block_tables), num_heads // kv_heads
        tree, has_window = self.tree, rule.window is not None
        limits = limits_of(query.device)
        widths = Widths.of(key_dim, value_dim)
        kind = HeadKind(groups, widths, keys.element_size(), tree is not None and has_window)
        tiles = choose_tiles(kind, -(-num_tokens // num_rows), limits.shared_bytes)
        num_tiles = num_tokens // tiles.tokens + num_rows
        max_context = self.block_tables.shape[1] * self.block_size
        num_programs = num_tiles * kv_heads * tiles.parts
        num_splits = self.num_splits or _num_splits(
            num_programs, max_context, limits.num_multiprocessors
        )
        out = torch.empty(num_tokens, num_heads, value_dim, device=query.device, dtype=query.dtype)
        parts = maxima = sums = out
        if num_splits > 1:
            parts = torch.empty(num_splits, *out.shape, device=query.device, dtype=torch.float32)
            maxima, sums = (
                torch.empty(parts.shape[:-1], device=query.device, dtype=torch.float32)
                for _ in range(2)
            )
        _attend[num_tiles, kv_heads * tiles.parts, num_splits](
            query,
            keys,
            values,
            out,
            parts,
            maxima,
            sums,
            self.tickets,
            rule.sinks,
            self.block_tables,
            self.starts,
            self.positions,
            self.positions if tree is None else tree.kv_indices,
            None if tree is None else tree.ancestors,
            None if tree is None else tree.first,
            query.stride(1),
            query.stride(2),
            self.block_tables.stride(0),
            num_tokens,
            num_rows,
            num_splits,
            rule.scaling,
            rule.softcap,
            size_of(rule.window),
            KV_HEADS=kv_heads,
            GROUPS=groups,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_SIZE=self.block_size,
            ROWS=row_bucket(num_rows),
            TILE=tiles.tokens,
            PARTS=tiles.parts,
            QUERIES=tiles.queries,
            KEYS=tiles.keys,
            KEY_WIDTH=widths.key,
            REST_WIDTH=widths.rest,
            VALUE_WIDTH=widths.value,
            IS_SPLIT=num_splits > 1,
            HAS_WINDOW=has_window,
            HAS_CHUNKS=isinstance(rule.window, Chunk),
            num_warps=tiles.num_warps,
        )
        return out


def triton_context(keys: torch.Tensor, block_size: int, layout: PassLayout) -> TritonContext:
    """As `paged.attention_context`."""
    return TritonContext.of(block_size, layout)


def _num_splits(num_programs: int, max_context: int, num_multiprocessors: int) -> int:
    """Programs enough for every multiprocessor where the context can be cut so far. With more than
    one split there are fewer than `_PROGRAMS * num_multiprocessors` of `num_programs`."""
    wanted = -(-_PROGRAMS * num_multiprocessors // num_programs)
    return max(1, min(wanted, -(-max_context // _SHORTEST_SPLIT), _MOST_SPLITS))
