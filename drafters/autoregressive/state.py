"""State of drafters that read their own drafted tokens, and the protocol of their steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import nn

from draftsmith.kernels.attention.paged import PagedPass


class HeadStep(NamedTuple):
    next_hidden: torch.Tensor  # [..., H], taken for the state at the next position
    head_input: torch.Tensor  # [..., H], what the draft head multiplies

    def select(self, chosen: torch.Tensor) -> HeadStep:
        return HeadStep(self.next_hidden[chosen], self.head_input[chosen])


class DraftPrefill(NamedTuple):
    """Drafter state after it read all committed tokens that it can. Rows without any have nothing
    to draft from."""

    indices: list[int]  # of the rows that can draft, ascending
    rows: torch.Tensor  # [R] the same rows
    budgets: torch.Tensor  # [R] tokens that each may draft
    positions: torch.Tensor  # [R] their last position with a state
    tables: torch.Tensor  # [R, max_blocks]
    step: HeadStep  # [R, H]

    def select(self, chosen: torch.Tensor, indices: list[int]) -> DraftPrefill:
        """Keep `chosen` [R'] of the R rows, which are `indices` of the batch."""
        return DraftPrefill(
            indices,
            self.rows[chosen],
            self.budgets[chosen],
            self.positions[chosen],
            self.tables[chosen],
            self.step.select(chosen),
        )


class ReadsOwnDrafts(Protocol):
    ahead: int  # the state at position t predicts the token at t + ahead

    @property
    def vocab_map(self) -> torch.Tensor | None: ...

    @abstractmethod
    def read_drafts(
        self, tokens: torch.Tensor, hidden: torch.Tensor, context: PagedPass
    ) -> HeadStep:
        """Drafted tokens [T] of a pass and the states before them [T, H]."""
        ...

    @abstractmethod
    def draft_logits(self, head_input: torch.Tensor) -> torch.Tensor:
        """[T, H] -> raw [T, Vd]."""
        ...


class ReadsCommitted(ReadsOwnDrafts, Protocol):
    @abstractmethod
    def read_committed(
        self, tokens: torch.Tensor, taps: torch.Tensor | None, context: PagedPass
    ) -> HeadStep:
        """Committed tokens [T] and the target's states before them [T, n * H_t], where the drafter
        reads any. The positions of the pass are those of its own states."""
        ...


class ChainState(NamedTuple):
    """Newest drafted token of each row of a chain and the state that it was drawn from."""

    tokens: torch.Tensor  # [R]
    hidden: torch.Tensor  # [R, H]
    positions: torch.Tensor  # [R] of the state
    tables: torch.Tensor  # [R, max_blocks]

    def select(self, chosen: torch.Tensor) -> ChainState:
        return ChainState(*(part[chosen] for part in self))


if TYPE_CHECKING:
    from typing_extensions import Self


class HasRotary(nn.Module):
    """Base of modules that rotate queries and keys. The frequencies are on the module's device, in
    float32 whatever it is cast to (rounded, they would move every position), and not in its state
    dict."""

    _rotary: tuple[nn.Module, ...] = ()  # a tuple keeps it out of the module's parts

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for rotary in self._rotary:
            rotary._apply(lambda tensor: tensor.to(fn(tensor).device))
        return self
