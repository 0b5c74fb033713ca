"""Training-time unrolling of a feature head: every anchor drafts at once, each query seeing exactly
what it would when serving.

Step 0 runs the head over true states. At step s the query at column t continues the draft that was
anchored at column t - s, so it sees the true keys (of step 0) at columns <= t - s, and of each
later step j only its own chain's key, at column t - (s - j). Where a row holds several texts, a
query sees the true keys of its own only; the chain of every depth that is valid there lies in it
anyway. With a window of w columns it sees none at t - w or before.

Legend: B rows, L columns, N columns with queries, D width of a head; keys are [B, kv_heads, L, D].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import torch
from torch.nn.functional import pad

from draftsmith.drafters.target.packed_pass import Sights
from draftsmith.drafters.unrolled.attention import attend, window_of
from draftsmith.drafters.unrolled.fused_unroll import Geometry
from draftsmith.kernels.attention.pool import Scoring

# A chunk of queries skips the step-0 keys that none of them may see.
CHUNK = 128
# Longer texts keep no attention weights. Fused attention takes 0.3 of the time for 8192 columns,
# and 1.5 of it for 160 in bfloat16 (AMD EPYC, forward and backward).
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
        self._geometries: dict[tuple[int, int | None], Geometry] = {}

    @cached_property
    def sights(self) -> Sights:
        return Sights(self.segments, CHUNK)

    def next_step(self) -> None:
        assert all(len(keys) == self.step + 1 for keys in self.keys.values()), (
            "one attention call per layer and step"
        )
        self.step += 1

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Scoring
    ) -> torch.Tensor:
        asked = (self.step, window_of(rule, "feature head"))
        # Under autocast the rotated queries and keys come wider than the values.
        query, key = query.to(value.dtype) * rule.scaling, key.to(value.dtype)
        keys, values = self.keys[layer], self.values[layer]
        keys.append(key)
        values.append(value)
        if asked not in self._geometries:
            first, length = self.first if self.step else 0, keys[0].shape[2]
            self._geometries[asked] = Geometry(
                self.segments, length, first, self.step, self.step, asked[1]
            )
        own, true = (_chain(keys), _chain(values)), (keys[0], values[0])
        return attend(query, own, true, self._geometries[asked], self.sights, LONG).transpose(1, 2)


def _chain(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """States of all steps -> [B, kv_heads, N, steps after step 0, D], at each column those of its
    chain. Before the first column they are zeros, unused."""
    newest, step = states[-1], len(states) - 1
    if step == 0:
        return newest.unsqueeze(3)[:, :, :, :0]
    later = (pad(one, (0, 0, step - at, 0)) for at, one in enumerate(states[1:], start=1))
    return torch.stack([one[:, :, : newest.shape[2]] for one in later], dim=3)
