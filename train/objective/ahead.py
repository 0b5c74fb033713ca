"""Asking for the target's states of the next batch while the draft's step on this one runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.train.objective.teacher import TargetSignals, TargetSource

Item = TypeVar("Item")


class Peekable(Generic[Item]):
    """An iterator whose next item may be looked at."""

    def __init__(self, source: Iterator[Item]):
        self.source = source
        self._held: deque[Item] = deque()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        return self._held.popleft() if self._held else next(self.source)

    def peek(self) -> list[Item]:
        """The next item, which stays; [] at the end."""
        if not self._held:
            self._held.extend(item for _, item in zip(range(1), self.source, strict=False))
        return list(self._held)


class Expect(Protocol):
    """Asks a target for states before they are needed."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        taps: tuple[int, ...],
        segments: torch.Tensor | None = None,
    ) -> None: ...


class AheadSource:
    """A source whose batches are announced in order. With each that is read the next one is asked
    for."""

    def __init__(self, source: TargetSource, expect: Expect):
        self.source, self.expect = source, expect
        self._coming: deque[TextBatch] = deque()

    def announce(self, texts: Iterable[TextBatch]) -> None:
        """Batches from the next one on; those announced before are forgotten."""
        self._coming = deque(texts)

    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        signals = self.source.read(text, taps)
        if self._coming:
            self._coming.popleft()
        if self._coming:
            coming = self._coming[0]
            self.expect(coming.input_ids, coming.attention_mask, taps, coming.segments)
        return signals
