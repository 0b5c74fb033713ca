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
        return TargetSignals(tapped, logits_at(self.target, hidden))


class SharedSource:
    """One source for several drafts that are trained on the same batches in turn: what was read of
    a batch is kept until another batch is asked for. `taps` are those of all of the drafts."""

    def __init__(self, source: TargetSource, taps: tuple[int, ...]):
        self.source, self.taps = source, taps
        self.num_reads = 0  # of the source
        self._last: tuple[TextBatch, TargetSignals] | None = None

    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        if self._last is None or not is_same_text(self._last[0], text):
            # Before the next ones exist, so that no two batches are held.
            self._last = None
            self._last = text, self.source.read(text, self.taps)
            self.num_reads += 1
        whole, distributions = self._last[1]
        if whole is None or not taps:
            return TargetSignals(None, distributions)
        if taps == self.taps:
            return TargetSignals(whole, distributions)
        parts = whole.chunk(len(self.taps), dim=-1)
        chosen = torch.cat([parts[self.taps.index(tap)] for tap in taps], dim=-1)
        return TargetSignals(chosen, distributions)


def is_same_text(one: TextBatch, other: TextBatch) -> bool:
    """True where a source gives the same signals of both: its weights may differ."""
    pairs = [
        (one.input_ids, other.input_ids),
        (one.attention_mask, other.attention_mask),
        (one.segments, other.segments),
        (one.token_index, other.token_index),
    ]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def logits_at(target: Target, hidden: torch.Tensor) -> DistributionsAt:
    """Logits from states [B, L, H] that the target's head multiplies; neighbouring rows that ask
    for one position share the product."""

    def distributions(row: torch.Tensor, position: torch.Tensor) -> TargetLogits:
        asked, which = (row * hidden.shape[1] + position - 1).unique_consecutive(
            return_inverse=True
        )
        before, on_host = hidden.flatten(0, 1)[asked], which.cpu()

        def logits(rows: slice) -> SharedLogits:
            first, last = on_host[rows][[0, -1]].tolist()
            return SharedLogits(target.head(before[first : last + 1]), which[rows] - first)

        return logits

    return distributions
