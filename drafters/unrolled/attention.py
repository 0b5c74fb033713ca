"""Training-time attention of queries that stand at the columns of texts: they see true keys of the
columns before theirs, up to a `Geometry`'s step, and a few keys of their own column alone.

The scores are therefore a causal block and a few diagonals, much less than those of all pairs of
keys.

Long texts take torch's fused attention on a CPU (`fused_unroll.py`) and `flex_attention` on a CUDA
device (`flex.py`), which keep no scores. Short texts, and devices without another form of it, keep
all scores of a chunk of columns; those of long texts are recomputed in the backward pass.

Legend: B rows, L columns of the true keys, N columns with queries, C of a chunk, S queries of a
column, O own keys of it, G queries a key-value head, D width of a head.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from draftsmith.drafters.target.packed_pass import Sight, Sights, begins_of, chunks
from draftsmith.drafters.unrolled.flex import LimitReached, Sees, block_mask, can_flex, flex
from draftsmith.drafters.unrolled.fused_unroll import Geometry, fused, mixed, scores_of
from draftsmith.kernels.attention.pool import Chunk, Scoring
from draftsmith.kernels.dispatch import reads_freely

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


def window_of(rule: Scoring, family: str) -> int | None:
    """The rule's window. Raises `ValueError` for attention that training has no form of."""
    if not rule.has_plain_scores or isinstance(rule.window, Chunk):
        raise ValueError(
            f"a {family} with a soft cap, sinks or chunks cannot be trained; use plain attention"
        )
    return rule.window


def attend(
    query: torch.Tensor, own: Pair, true: Pair, geometry: Geometry, sights: Sights, long: int
) -> torch.Tensor:
    """Scaled queries [B, heads, N * S, D], own keys and values [B, kv_heads, N, O, ...], and true
    ones [B, kv_heads, L, ...] -> [B, heads, N * S, value dim].

    Args:
        sights: of the chunks of columns whose queries attend at once.
        long: columns of which scores are kept.
    """
    is_long = geometry.length > long
    if is_long and can_flex(query, own[1]):
        with suppress(LimitReached):
            return _flex(query, own, true, geometry)
    if is_long and reads_freely(query.device):
        # Fused attention takes values as wide as keys.
        size = own[1].shape[-1]
        width = max(query.shape[-1], size)
        wide_own, wide_true = ((_wide(k, width), _wide(v, width)) for k, v in (own, true))
        return fused(_wide(query, width), wide_own, wide_true, geometry)[..., :size]
    return _dense(query, own, true, geometry, sights, recomputed=is_long)


def _wide(states: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - states.shape[-1]
    return pad(states, (0, missing)) if missing else states


def _flex(query: torch.Tensor, own: Pair, true: Pair, geometry: Geometry) -> torch.Tensor:
    # Each call saves a copy of all keys and values for its backward pass.
    key, value = (
        torch.cat([shared, mine.flatten(2, 3)], dim=2)
        for mine, shared in zip(own, true, strict=True)
    )
    return flex(query, key, value, _mask(geometry, query))


def _mask(geometry: Geometry, like: torch.Tensor) -> BlockMask:
    if geometry.mask is None:
        rows = None if geometry.segments is None else len(like)
        num_keys = geometry.num_own * (geometry.length - geometry.first) + geometry.length
        geometry.mask = block_mask(_seen(geometry, like.device), rows, like, num_keys)
    return geometry.mask


def _seen(geometry: Geometry, device: torch.device) -> Sees:
    """Own keys, column after column, stand behind the true ones. What `sees` needs is looked up, as
    torch does not compile divisions of indices without bounds."""
    segments, slots, num_own = geometry.segments, geometry.slots, geometry.num_own
    step, window, causal = geometry.step, geometry.window, geometry.causal
    every = torch.arange(geometry.length, device=device)
    at = every[geometry.first :]
    columns, slot = at.repeat_interleave(slots), torch.arange(slots, device=device).repeat(len(at))
    own_place = torch.arange(num_own, device=device) + slots - num_own
    key_columns = torch.cat([every, at.repeat_interleave(num_own)])
    key_places = torch.cat([torch.zeros_like(every), own_place.repeat(len(at))])
    is_own = torch.arange(len(key_columns), device=device) >= len(every)
    begins = None if segments is None else begins_of(segments)[:, columns]

    def sees(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        column, back = columns[query] - key_columns[key], slot[query] - key_places[key]
        true, own = column >= step, column == 0
        if begins is not None:
            true = true & (key_columns[key] >= begins[row, query])
        if causal:
            own = own & (back >= 0)
        seen = torch.where(is_own[key], own, true)
        return seen if window is None else seen & (column + back < window)

    return sees


def _dense(
    query: torch.Tensor,
    own: Pair,
    true: Pair,
    geometry: Geometry,
    sights: Sights,
    *,
    recomputed: bool,
) -> torch.Tensor:
    """Scores are kept for the backward pass, or recomputed there."""
    attend = partial(checkpoint, _attend, use_reentrant=False) if recomputed else _attend
    first, states = geometry.first, [query.unflatten(2, (-1, geometry.slots)), *own]
    outputs = []
    for begin, end in chunks(first, geometry.length, sights.size):
        sight = sights.of(begin, end, geometry.window)
        part, key, value = (one[:, :, begin - first : end - first] for one in states)
        last = max(end - geometry.step, sight.first)  # no query here sees a later column
        true_key, true_value = (one[:, :, sight.first : last] for one in true)
        outputs.append(attend(part, key, value, true_key, true_value, begin, sight, geometry))
    return torch.cat(outputs, dim=2).flatten(2, 3)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    true_key: torch.Tensor,
    true_value: torch.Tensor,
    begin: int,
    sight: Sight,
    geometry: Geometry,
) -> torch.Tensor:
    """Scaled queries [B, heads, C, S, D] of the columns from `begin`; key and value [B, kv_heads,
    C, O, D]; the true ones from the column `sight.first` on."""
    heads, size, slots = query.shape[1:4]
    kv_heads, visible = key.shape[1], true_key.shape[2]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # [B, kv_heads, G, C, S, D]

    true = (grouped.flatten(2, 4) @ true_key.transpose(-1, -2)).unflatten(2, (-1, size, slots))
    columns = torch.arange(begin, begin + size, device=query.device)[:, None, None]
    true_columns = torch.arange(sight.first, sight.first + visible, device=query.device)
    hidden = true_columns > columns - geometry.step
    if sight.window is not None:
        slot = torch.arange(slots, device=query.device)
        hidden = hidden | (columns + slot[:, None] - true_columns >= sight.window)
    if sight.begins is not None:
        hidden = hidden | (true_columns < sight.begins[:, None, None, :, None, None])
    true = true.masked_fill(hidden, -torch.inf)
    if geometry.is_chain:
        own = scores_of(grouped, key.unsqueeze(2), is_chain=True)
    else:
        own = torch.einsum("bkgcsd,bkcod->bkgcso", grouped, key)
    own = own.masked_fill(geometry.hidden_own(query.device), -torch.inf)

    precise = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat([true, own], dim=-1).softmax(dim=-1, dtype=precise).to(query.dtype)
    output = (weights[..., :visible].flatten(2, 4) @ true_value).unflatten(2, (-1, size, slots))
    if geometry.is_chain:
        of_own = mixed(weights[..., visible:], value.unsqueeze(2), is_chain=True)
    else:
        of_own = torch.einsum("bkgcso,bkcod->bkgcsd", weights[..., visible:], value)
    return (output + of_own).flatten(1, 2)
