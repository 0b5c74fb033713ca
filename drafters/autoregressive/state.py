"""State of drafters that read their own drafted tokens, and the committed tokens that a round has
to read.

B rows of the batch, R rows with something to read, T tokens to be read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftsmith.drafters.interface import DraftInputs


class HeadStep(NamedTuple):
    next_hidden: torch.Tensor  # [..., H], taken for the state at the next position
    head_input: torch.Tensor  # [..., H], what the draft head multiplies

    def select(self, chosen: torch.Tensor) -> HeadStep:
        return HeadStep(self.next_hidden[chosen], self.head_input[chosen])


class ChainState(NamedTuple):
    """Newest drafted token of each row of a chain and the state that it was drawn from."""

    tokens: torch.Tensor  # [R]
    hidden: torch.Tensor  # [R, H]
    positions: torch.Tensor  # [R] of the state
    tables: torch.Tensor  # [R, max_blocks]

    def select(self, chosen: torch.Tensor) -> ChainState:
        return ChainState(*(part[chosen] for part in self))


class Unread(NamedTuple):
    """Tokens that a round has to read, on the host.

    The state at position t predicts the token at t + `ahead` and comes from the one before it: with
    ahead 2 the newest token of a row has no state yet.
    """

    rows: list[int]  # [R] of the batch, ascending
    counts: list[int]  # [R] tokens of each
    starts: list[int]  # [R] position of the first state
    begins: list[int]  # [R] index of the first token among the inputs' tokens

    @classmethod
    def of(cls, inputs: DraftInputs, ahead: int) -> Unread:
        found = cls([], [], [], [])
        begin, without = 0, ahead - 1  # tokens of a row that have no state of their own
        for row, (start, length) in enumerate(zip(inputs.starts.tolist(), inputs.lengths.tolist())):
            if length > without:
                found.rows.append(row)
                found.counts.append(length - without)
                found.starts.append(start)
                found.begins.append(begin + without)
            begin += length
        return found

    def spread(self, begins: list[int]) -> list[int]:
        """[T] numbers counting up in each row from its own of `begins` [R]."""
        pairs = zip(begins, self.counts)
        return [number for begin, count in pairs for number in range(begin, begin + count)]
