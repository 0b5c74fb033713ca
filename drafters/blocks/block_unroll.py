"""Training-time attention of a block drafter: at every column of a text stands a block of slots, as
it would when serving.

The block at column n sees the context keys of the columns before n and its own slots, if causal
only those up to each. With a window a slot sees so many columns at most, its own among them.

Legend: B rows, L columns, N blocks, S slots of a block, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from draftsmith.drafters.target.packed_pass import Sights
from draftsmith.drafters.unrolled.attention import Pair, attend, window_of
from draftsmith.drafters.unrolled.fused_unroll import Geometry
from draftsmith.kernels.attention.pool import Scoring

# Columns whose blocks attend at once; they skip the context that none of them may see.
CHUNK = 64
# Of longer texts no scores are kept. Of 160 columns fused attention takes as long as scores do in
# float32, and twice as long in bfloat16 (AMD EPYC with AVX-512, forward and backward).
LONG = 512


class BlockPass:
    """An `AttentionContext`. `context`: of every layer, keys and values [B, kv_heads, L, D] of the
    context; None where the first slot of each block is the context of those after it. Blocks stand
    at the columns from `first` on; where they are the context, the columns before have that slot
    alone. Where a row holds several texts, a block sees its own only."""

    def __init__(
        self,
        context: Sequence[Pair] | None,
        *,
        slots: int,
        causal: bool | Callable[[int], bool],
        segments: torch.Tensor | None = None,
        first: int = 0,
    ):
        self.context, self.slots, self.first = context, slots, first
        self.is_causal = causal if callable(causal) else lambda layer: causal
        self.segments, self.sights = segments, Sights(segments, CHUNK)
        self._geometries: dict[tuple[int, int, bool, int | None], Geometry] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        """Attention of (L - first) * S slots, block after block, behind the slots that stand
        alone."""
        window = window_of(rule, "block drafter")
        # Under autocast the rotated queries and keys come wider than the values.
        query = query * rule.scaling
        states = [one.to(value.dtype) for one in (query, key, value)]
        first, causal = self.first, self.is_causal(layer)
        if self.context is not None:
            keys, values = (one.to(value.dtype) for one in self.context[layer])
            return self._blocks(states, (keys, values), (first, self.slots, causal, window))
        _, *own = states
        keys, values = (
            torch.cat([one[:, :, :first], one[:, :, first :: self.slots]], dim=2) for one in own
        )
        behind = [one[:, :, first:] for one in states]
        found = self._blocks(behind, (keys, values), (first, self.slots, causal, window))
        if not first:
            return found
        alone = [one[:, :, :first] for one in states]
        before = (keys[:, :, :first], values[:, :, :first])
        return torch.cat([self._blocks(alone, before, (0, 1, causal, window)), found], dim=1)

    def _blocks(
        self,
        states: Sequence[torch.Tensor],
        context: Pair,
        asked: tuple[int, int, bool, int | None],
    ) -> torch.Tensor:
        """Queries, keys and values [B, ., N * slots, D] of N blocks, `asked` as (column of the
        first, slots, causal, window) -> [B, N * slots, heads, value dim]."""
        first, slots, causal, window = asked
        if asked not in self._geometries:
            length = context[0].shape[2]
            segments = None if self.segments is None else self.segments[:, :length]
            # A block stands one column behind the last that it sees.
            self._geometries[asked] = Geometry(
                segments, length, first, 1, slots, window, slots=slots, causal=causal
            )
        query, key, value = states
        own = (key.unflatten(2, (-1, slots)), value.unflatten(2, (-1, slots)))
        geometry = self._geometries[asked]
        return attend(query, own, context, geometry, self.sights, LONG).transpose(1, 2)
