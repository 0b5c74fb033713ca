"""A target small enough that the distribution of its whole texts is known, and drafts for it.

A context is a whole text: the empty one is 0, and token v after context c gives c V + v + 1. The
tables depend on the last two tokens. Legend: V vocabulary, C contexts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.kernels.sampling.filters import SamplingRows, process

LENGTH = 7  # most tokens of a context
START = 0
LIKENESS = 0.7  # how much of the target's logits is in the draft's


class World(NamedTuple):
    """Processed logits of target and draft in every context."""

    p_logits: torch.Tensor  # [C, V] float32
    q_logits: torch.Tensor  # [C, V] float32

    @property
    def vocab_size(self) -> int:
        return self.p_logits.shape[-1]

    def after(self, contexts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The contexts one token later; a negative token, which is none, counts as token 0."""
        return contexts * self.vocab_size + tokens.clamp(min=0) + 1


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Sampling parameters of an audited case."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    draft_filtered: bool = True  # the draft's distribution goes through the same filters
    deterministic: bool = False  # the draft proposes its likeliest tokens and gives no distribution

    def world(self, vocab_size: int, seed: int) -> World:
        """Random tables; the draft resembles the target."""
        generator = torch.Generator().manual_seed(seed)
        shape = vocab_size * vocab_size, vocab_size
        p = 1.5 * torch.randn(shape, generator=generator)
        q = LIKENESS * p + torch.randn(shape, generator=generator)
        last_two = _last_two(vocab_size)
        return World(
            self._process(p[last_two], filtered=True),
            self._process(q[last_two], filtered=self.draft_filtered),
        )

    def _process(self, logits: torch.Tensor, *, filtered: bool) -> torch.Tensor:
        count = len(logits)
        rows = SamplingRows.of(
            [self.temperature] * count,
            top_k=[self.top_k if filtered else 0] * count,
            top_p=[self.top_p if filtered else 1.0] * count,
        )
        return process(logits, rows)


def _last_two(vocab_size: int) -> torch.Tensor:
    """[C]: the last two tokens of every context as one number; before the start they are 0."""
    contexts = torch.arange(sum(vocab_size**shorter for shorter in range(LENGTH)))
    above = (contexts - 1).clamp(min=0) // vocab_size
    newest, older = (contexts - 1) % vocab_size, (above - 1) % vocab_size
    return torch.where(above > 0, older, 0) * vocab_size + torch.where(contexts > 0, newest, 0)
