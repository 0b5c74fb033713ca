"""Training-time unrolling of a feature head: every anchor drafts at once, each query seeing exactly
what it would when serving.

Step 0 runs the head over true states. At step s the query at column t continues the draft that was
anchored at column t - s, so it sees the true keys (of step 0) at columns <= t - s, and of each
later step j only its own chain's key, at column t - (s - j). The scores are therefore a causal
block and s diagonals: much less than the s + 1 blocks of a masked attention over all keys, and 2.6
times faster on a CPU (hidden 256, 8 x 160 tokens, 4 steps, forward and backward). Where a row holds
several texts, a query sees the true keys of its own only; the diagonals of every depth that is
valid there lie in it anyway. With a window of w columns it sees none at t - w or before.

Legend: B rows, L columns, C columns of a chunk, G queries a key-value head, D width of a head; keys
are [B, kv_heads, L, D].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from draftsmith.drafters.target.packed_pass import Sight, Sights, begins_of, chunks
from draftsmith.drafters.unrolled.flex import LimitReached, Sees, block_mask, can_flex, flex
from draftsmith.drafters.unrolled.fused_unroll import (
    Geometry,
    KeySpan,
    can_fuse,
    fused_attention,
    spans_of,
)
from draftsmith.kernels.attention.pool import Chunk, Scoring

# A chunk of queries skips the step-0 keys that none of them may see.
CHUNK = 128
# Longer texts keep no attention weights: fused attention on a CPU and `flex_attention` on a CUDA
# device do not make them, and otherwise they are recomputed in the backward pass. Fused attention
# takes 0.3 of the time for 8192 columns, and 1.5 of it for 160 in bfloat16 (AMD EPYC, forward and
# backward).
LONG = 1024


class UnrollPass:
    """Attention context of a head's unroll; call `next_step()` between steps. Steps after step 0
    have the columns from `first` on alone."""

    def __init__(self, segments: torch.Tensor | None = None, *, first: int = 0) -> None:
        self.first = first
        self.segments = segments
        # One tensor per step, of every layer.
        self.keys: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.values: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.step = 0
        self._spans: list[KeySpan] = []
        self._masks: dict[tuple[int, int | None], BlockMask] = {}

    @cached_property
    def sights(self) -> Sights:
        return Sights(self.segments, CHUNK)

    def spans(self, length: int) -> list[KeySpan]:
        """Texts, and padding, of all rows of so many columns."""
        if not self._spans:
            self._spans = spans_of(self.segments, length)
        return self._spans

    def next_step(self) -> None:
        assert all(len(keys) == self.step + 1 for keys in self.keys.values()), (
            "one attention call per layer and step"
        )
        self.step += 1

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        if not rule.has_plain_scores or isinstance(rule.window, Chunk):
            raise ValueError(
                "a feature head with a soft cap, sinks or chunks cannot be unrolled; use plain "
                "attention"
            )
        # Under autocast the rotated queries and keys come wider than the values.
        query, key = query.to(value.dtype) * rule.scaling, key.to(value.dtype)
        keys, values = self.keys[layer], self.values[layer]
        keys.append(key)
        values.append(value)
        return self.weigh(query, keys, values, rule.window).transpose(1, 2)

    def weigh(
        self,
        query: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        window: int | None,
    ) -> torch.Tensor:
        """Scaled queries of the newest step, keys and values of all -> [B, heads, L, value dim]."""
        first = self.first if self.step else 0
        length = first + query.shape[2]
        if length > LONG and can_fuse(query, values[0]):
            geometry = Geometry(self.spans(length), self.step, first, window)
            return fused_attention(query, keys, values, geometry)
        if length > LONG and can_flex(query, values[0]):
            with suppress(LimitReached):
                return self._flex(query, keys, values, Geometry([], self.step, first, window))
        outputs = []
        for begin, end in chunks(first, length, CHUNK):
            part = query[:, :, begin - first : end - first]
            sight = self.sights.of(begin, end, window)
            inputs = (part, begin, first, sight, tuple(keys), tuple(values))
            outputs.append(
                _attend(*inputs)
                if length <= LONG
                else checkpoint(_attend, *inputs, use_reentrant=False)
            )
        return torch.cat(outputs, dim=2)

    def _flex(
        self,
        query: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        geometry: Geometry,
    ) -> torch.Tensor:
        # Each step saves a copy of the keys and values of all steps up to it for its backward pass.
        key, value = torch.cat(tuple(keys), dim=2), torch.cat(tuple(values), dim=2)
        asked = (geometry.step, geometry.window)
        if asked not in self._masks:
            length = geometry.first + query.shape[2]
            sees = _seen(self.segments, geometry, length, query.device)
            rows = None if self.segments is None else len(query)
            self._masks[asked] = block_mask(sees, rows, query, key.shape[2])
        return flex(query, key, value, self._masks[asked])


def is_hidden(
    columns: torch.Tensor, key_columns: torch.Tensor, step: int, sight: Sight
) -> torch.Tensor:
    """Mask of step-0 keys that a query must not see: those behind the column where its draft is
    anchored, those before its text begins, and those that its window is past."""
    hidden = key_columns > columns - step
    if sight.window is not None:
        hidden = hidden | (key_columns <= columns - sight.window)
    if sight.begins is not None:
        hidden = hidden | (key_columns < sight.begins[:, None, None, :, None])
    return hidden


def _seen(
    segments: torch.Tensor | None, geometry: Geometry, length: int, device: torch.device
) -> Sees:
    """True keys, of so many columns, stand before those of the later steps. What `sees` needs is
    looked up, as torch does not compile divisions of indices without bounds."""
    step, first, window = geometry.step, geometry.first, geometry.window
    every = torch.arange(length, device=device)
    columns = every[first:]
    key_columns = torch.cat([every, columns.repeat(step)])
    later = torch.arange(1, step + 1, device=device).repeat_interleave(length - first)
    key_steps = torch.cat([torch.zeros_like(every), later])
    begins = None if segments is None else begins_of(segments)[:, columns]

    def sees(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        back = columns[query] - key_columns[key]
        true, own = back >= step, back == step - key_steps[key]
        if begins is not None:
            true = true & (key_columns[key] >= begins[row, query])
        seen = torch.where(key_steps[key] == 0, true, own)
        return seen if window is None else seen & (back < window)

    return sees


def _attend(
    query: torch.Tensor,
    begin: int,
    later_first: int,
    sight: Sight,
    keys: tuple[torch.Tensor, ...],
    values: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Scaled queries [B, heads, C, D] of the columns from `begin` at the newest step -> [B, heads,
    C, value dim]. Keys and values of the later steps are those of the columns from `later_first`
    on."""
    rows, heads, size, _ = query.shape
    kv_heads, step, first, end = keys[0].shape[1], len(keys) - 1, sight.first, begin + size
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, size, -1)  # [B, kv_heads, G, C, D]
    flat = grouped.flatten(2, 3)  # [B, kv_heads, G * C, D]

    last = max(end - step, first)  # no query here is anchored at a later column
    block = (flat @ keys[0][:, :, first:last].transpose(-1, -2)).unflatten(2, (-1, size))
    columns = torch.arange(begin, end, device=query.device)
    key_columns = torch.arange(first, last, device=query.device)
    hidden = is_hidden(columns[:, None], key_columns, step, sight)
    scores = [block.masked_fill(hidden, -torch.inf)]
    chain_values = []
    place = slice(begin - later_first, end - later_first)
    oldest = 1 if sight.window is None else max(1, step + 1 - sight.window)
    for later in range(oldest, step + 1):
        back = step - later
        scores.append((grouped * _shifted(keys[later], back, place)).sum(dim=-1, keepdim=True))
        chain_values.append(_shifted(values[later], back, place))

    precise = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat(scores, dim=-1).softmax(dim=-1, dtype=precise).to(query.dtype)
    output = (weights[..., : last - first].flatten(2, 3) @ values[0][:, :, first:last]).unflatten(
        2, (-1, size)
    )
    for index, value in enumerate(chain_values, start=last - first):
        output = output + weights[..., index, None] * value
    return output.flatten(1, 2)


def _shifted(states: torch.Tensor, back: int, place: slice) -> torch.Tensor:
    """States `back` columns before each of `place`, [B, kv_heads, 1, C, D]. Before the first column
    they are zeros, unused."""
    return pad(states, (0, 0, back, 0))[:, :, None, place]
