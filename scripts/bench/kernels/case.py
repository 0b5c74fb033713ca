"""A case of the kernel benchmark: its ways and the bytes that none can avoid moving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Call = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    vocabularies: tuple[int, ...]
    divergence_vocabularies: tuple[int, ...]
    requests: int
    depth: int  # drafted tokens per request
    tokens: int  # rows of a divergence
    width: int  # of its hidden states
    context: int  # of attention
    layers_kv: tuple[int, int, int]  # query heads, key heads, width of a head

    @property
    def middle(self) -> int:
        """The vocabulary at which what does not differ between them is measured: narrow logits,
        compiled references."""
        return self.vocabularies[len(self.vocabularies) // 2]

    def compiled(self, vocab_size: int) -> list[str]:
        """A compilation takes longer than all runs of a case together, so that one vocabulary must
        do."""
        return ["reference"] if vocab_size == self.middle else []


@dataclass
class Case:
    name: str
    shape: str
    floor_bytes: int  # 0 where arithmetic and not traffic is the bound
    ways: dict[str, Call]
    # names of ways to be timed under torch.compile as well
    compiled: list[str] = field(default_factory=list)
