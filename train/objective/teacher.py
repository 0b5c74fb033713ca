"""Source of a draft's inputs and of the distributions it is trained to match: the running target
here, stored data in `stored_teacher`.

The objective reads `TargetSignals` alike from both. B rows of L tokens, R drafted tokens, V target
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.divergence.fused import SharedLogits, TargetLogits
from draftsmith.kernels.sampling.top_tokens import TopProbs

# (row [R], position [R]) -> the target's distributions of the tokens at these positions, given the
# text before them, as `divergence` takes them.
DistributionsAt = Callable[[torch.Tensor, torch.Tensor], TargetLogits | TopProbs]
# (states [d, H], their places in the flat batch [d]) -> (logits, whether they are narrow), as
# `SharedLogits` holds them.
Head = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, bool]]


class TargetSignals(NamedTuple):
    """Taps and distributions of the target on one batch of text."""

    taps: torch.Tensor | None  # [B, L, n * H]; None when none were asked for
    distributions: DistributionsAt


class TargetSource(Protocol):
    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        """`taps` as in `drafters/target/taps.py`."""
        ...


class StateReader(Protocol):
    """States of texts, as `Target.states` gives them."""

    def states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        taps: tuple[int, ...],
        segments: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]: ...


class LiveSource:
    """The running target, in one pass over the text. `reader` reads the states in its place."""

    def __init__(self, target: Target, reader: StateReader | None = None):
        self.target, self.reader = target, target if reader is None else reader

    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        tapped, hidden = self.reader.states(
            text.input_ids, text.attention_mask, taps, text.segments
        )
        return TargetSignals(tapped, logits_at(hidden, whole_head(self.target)))


def whole_head(target: Target) -> Head:
    return lambda states, _: (target.head(states), False)


def logits_at(hidden: torch.Tensor, head: Head) -> DistributionsAt:
    """Logits from states [B, L, H] that the target's head multiplies; neighbouring rows that ask
    for one position share the product."""

    def distributions(row: torch.Tensor, position: torch.Tensor) -> TargetLogits:
        asked, which = (row * hidden.shape[1] + position - 1).unique_consecutive(
            return_inverse=True
        )
        before, on_host = hidden.flatten(0, 1)[asked], which.cpu()

        def logits(rows: slice) -> SharedLogits:
            first, last = on_host[rows][[0, -1]].tolist()
            part = slice(first, last + 1)
            found, is_narrow = head(before[part], asked[part])
            return SharedLogits(found, which[rows] - first, is_narrow)

        return logits

    return distributions
