"""Top-k, top-p and min-p of one row inside Triton kernels, without an order of its tokens.

What filters keep of a row is what lies above a cut, and of the tokens that equal the cut those of
the highest ids: `filters.py` removes from the front of a stable ascending order. A reader of a row
needs no filtered copy: a logit, its id, the cut and an id say what `is_kept`. The cut is found by
bisection on the numbers' own bits: at most 32 steps, each of which weighs the tokens up to a key.
Only tokens that a bound does not rule out are weighed: each block of the vocabulary has laid its
own side by side, in the order of their ids.

Masses are sums of exp(x - maximum). They are added up in float32 lane by lane and the lanes in
float64, and are rounded to float32 where they are held against 1 - top_p, as torch's are.
"""

from __future__ import annotations

import triton
import triton.language as tl

MINUS_INF = tl.constexpr(float("-inf"))
LARGEST = tl.constexpr(3.4028234663852886e38)
# Of logarithms in float32, by which a bound on the cut is lowered.
_SLACK = tl.constexpr(0.01)


@triton.jit
def clean(x):
    """float32 logits with NaN as -inf and +inf as the largest float."""
    x = x.to(tl.float32)
    return tl.minimum(tl.where(x != x, MINUS_INF, x), LARGEST)


@triton.jit
def tempered(x, temperature):
    """Cleaned float32 logits by a temperature; a greedy row's stay as they are."""
    x = clean(x)
    if (temperature > 0) & (temperature != 1):
        x = tl.minimum(tl.div_rn(x, temperature), LARGEST)
    return x


@triton.jit
def key_of(x):
    """int32 in the order of float32 numbers; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def is_kept(x, ids, cut, first_id):
    """Mask of tokens `ids` with logits x: those above the key `cut`, and from `first_id` on those
    that equal it."""
    keys = key_of(x)
    return (keys > cut) | ((keys == cut) & (ids >= first_id))


@triton.jit
def _number_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _reached(values, count, SIZE: tl.constexpr):
    """The largest number that `count` of values [SIZE] reach; -inf for more than there are."""
    keys = key_of(values)
    low, high = tl.min(keys, axis=0).to(tl.int64), tl.max(keys, axis=0).to(tl.int64)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return tl.where(count > SIZE, MINUS_INF, _number_of(low.to(tl.int32)))


@triton.jit
def bound_of(maxima, top_k, top_p, min_p, num_tokens, SIZE: tl.constexpr):
    """A number that no filter's cut lies below. `maxima` [SIZE] are those of disjoint parts of the
    row."""
    top = tl.max(maxima, axis=0)
    bound = top
    if top_k > 0:
        # Each part has a token that large.
        bound = _reached(maxima, top_k, SIZE)
    else:
        if min_p > 0:
            bound = top + tl.log(min_p) - _SLACK
        if top_p < 1:
            # All tokens that far below the maximum have together no more mass than is removed.
            least = top + tl.log((1.0 - top_p).to(tl.float32) / num_tokens) - _SLACK
            bound = tl.where(min_p > 0, tl.maximum(bound, least), least)
    return bound


@triton.jit
def tile(
    values, sizes, start, other, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PART: tl.constexpr
):
    """(what lies at `start` to `start + PART` of every block [BLOCKS, PART], bool where there is
    something). `sizes` [BLOCKS] is how much lies in each."""
    blocks = tl.arange(0, BLOCKS)[:, None]
    places = start + tl.arange(0, PART)[None, :]
    inside = places < sizes[:, None]
    return tl.load(values + blocks * BLOCK + places, mask=inside, other=other), inside


@triton.jit
def weight(
    values,  # [blocks, BLOCK] float32
    sizes,  # [BLOCKS] int32
    first,
    last,
    top,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
):
    """float64 mass, or number where `COUNTED`, of the tokens with `first` <= key <= `last`."""
    lanes = tl.zeros([BLOCKS, PART], tl.float32)
    for start in range(0, tl.max(sizes, axis=0), PART):
        x, inside = tile(values, sizes, start, MINUS_INF, BLOCK, BLOCKS, PART)
        keys = key_of(x)
        chosen = inside & (keys >= first) & (keys <= last)
        lanes += tl.where(chosen, 1.0 if COUNTED else tl.exp(x - top), 0.0)
    return tl.sum(tl.sum(lanes.to(tl.float64), axis=1), axis=0)


@triton.jit
def find_cut(
    values,  # [blocks, BLOCK] float32
    sizes,  # [BLOCKS] int32
    first,  # key of the least token that counts
    top,  # the row's maximum
    base,  # float64 weight of tokens that lie nowhere
    total,  # float64; weights are shares of it
    limit,  # float32
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
):
    """The least key up to which the weight is more than `limit`; the maximum's where none is."""
    low, high = first.to(tl.int64), key_of(top).to(tl.int64)
    while low < high:
        middle = low + ((high - low) >> 1)
        below = weight(values, sizes, first, middle, top, COUNTED, BLOCK, BLOCKS, PART)
        over = ((base + below) / total).to(tl.float32) > limit
        high = tl.where(over, middle, high)
        low = tl.where(over, low, middle + 1)
    return low.to(tl.int32)


@triton.jit
def first_kept_id(
    values,  # [blocks, BLOCK] float32
    ids,  # [blocks, BLOCK] int32
    sizes,  # [BLOCKS] int32
    num_tokens,  # V
    first,
    cut,
    top,
    base,
    total,
    limit,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
):
    """The least id that is kept of the tokens whose key is `cut`: as many of the lower ones are
    removed as the mass up to them is at most `limit`, but not all of them."""
    below = base + weight(values, sizes, first, cut - 1, top, False, BLOCK, BLOCKS, PART)
    each = tl.exp(_number_of(cut) - top).to(tl.float64)
    equals = weight(values, sizes, cut, cut, top, True, BLOCK, BLOCKS, PART)
    removed, most = tl.zeros((), tl.int64), equals.to(tl.int64) - 1
    while removed < most:
        middle = removed + ((most - removed + 1) >> 1)
        fits = ((below + middle.to(tl.float64) * each) / total).to(tl.float32) <= limit
        removed = tl.where(fits, middle, removed)
        most = tl.where(fits, most, middle - 1)
    low, high = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    if removed > 0:
        high += num_tokens - 1
    while low < high:
        middle = low + ((high - low) >> 1)
        lanes = tl.zeros([BLOCKS, PART], tl.int32)
        for start in range(0, tl.max(sizes, axis=0), PART):
            x, inside = tile(values, sizes, start, MINUS_INF, BLOCK, BLOCKS, PART)
            tokens, _ = tile(ids, sizes, start, 0, BLOCK, BLOCKS, PART)
            lanes += (inside & (key_of(x) == cut) & (tokens <= middle)).to(tl.int32)
        over = tl.sum(tl.sum(lanes, axis=1), axis=0) > removed
        high = tl.where(over, middle, high)
        low = tl.where(over, low, middle + 1)
    return low


@triton.jit
def _least_of_min_p(
    values,  # [blocks, BLOCK] float32
    sizes,  # [BLOCKS] int32
    top,
    min_p,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
):
    """Key of the least token that is `min_p` times as likely as the maximum, or more."""
    lanes = tl.full([BLOCKS, PART], 0x7FFFFFFF, tl.int32)
    for start in range(0, tl.max(sizes, axis=0), PART):
        x, inside = tile(values, sizes, start, MINUS_INF, BLOCK, BLOCKS, PART)
        likely = inside & (tl.exp(x - top) >= min_p)
        lanes = tl.where(likely, tl.minimum(lanes, key_of(x)), lanes)
    return tl.min(tl.min(lanes, axis=1), axis=0)


@triton.jit
def filter_row(
    values,  # [blocks, BLOCK] float32, the tokens at `bound` and above
    ids,  # [blocks, BLOCK] int32
    sizes,  # [BLOCKS] int32
    num_tokens,  # V
    top,
    bound,
    base,  # float64 mass below `bound`
    top_k,
    top_p,
    min_p,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PART: tl.constexpr,
):
    """(key of the cut of all filters, the least id that is kept of the tokens that equal it)."""
    cut, first_id = key_of(bound), tl.zeros((), tl.int32)
    if top_k > 0:
        fewer = (tl.sum(sizes, axis=0) - top_k).to(tl.float32)
        none, one = base * 0.0, base * 0.0 + 1.0
        cut = find_cut(values, sizes, cut, top, none, one, fewer, True, BLOCK, BLOCKS, PART)
    if top_p < 1:
        first = cut
        below = tl.where(top_k > 0, 0.0, base)
        mass = weight(values, sizes, first, key_of(top), top, False, BLOCK, BLOCKS, PART)
        limit = (1.0 - top_p).to(tl.float32)
        cut = find_cut(
            values, sizes, first, top, below, below + mass, limit, False, BLOCK, BLOCKS, PART
        )
        first_id = first_kept_id(
            values, ids, sizes, num_tokens, first, cut, top, below, below + mass, limit, BLOCK,
            BLOCKS, PART,
        )  # fmt: skip
    if min_p > 0:
        least = _least_of_min_p(values, sizes, top, min_p, BLOCK, BLOCKS, PART)
        first_id = tl.where(least > cut, 0, first_id)
        cut = tl.maximum(cut, least)
    return cut, first_id
