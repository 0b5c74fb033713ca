"""Roles of a text's positions in rounds of draft and target, as rows to train on.

Along the text a drafted token is trained wherever verification looked at it: accepted ones, and the
first rejected one of each round. The rest of a rejected draft is no part of the text; it is a row
of its own, the branch, whose distributions are known because the target reads any text.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.record import UNLOGGED
from draftsmith.train.config import KEPT_POSITIONS
from draftsmith.train.data.batches import TrainedText


class Role(enum.IntEnum):
    """Outcome of verification at a position of text that rounds wrote."""

    CONTEXT = 0  # the prompt, or text without a known role
    ACCEPTED = 1  # the drafted token was accepted
    FIRST_REJECTED = 2  # the drafted token was rejected; the token here is the target's
    BONUS = 3  # the target's token after a fully accepted draft


@dataclass(frozen=True, kw_only=True)
class RoleWeights:
    """Training weight of a position by its role; 0 is not trained."""

    accepted: float
    first_rejected: float
    bonus: float
    later_rejected: float  # of the rest of a rejected draft

    @classmethod
    def at(cls, positions: Collection[str], *, later_rejected: float) -> RoleWeights:
        """Weight 1 for each of the named positions of a text, 0 for the others."""
        kept = {name.replace("-", "_"): float(name in positions) for name in KEPT_POSITIONS}
        return cls(**kept, later_rejected=later_rejected)

    def of(self, roles: np.ndarray) -> np.ndarray:
        """[n] roles of a text -> [n] float32 weights."""
        table = np.zeros(len(Role), dtype=np.float32)
        table[Role.ACCEPTED], table[Role.FIRST_REJECTED], table[Role.BONUS] = (
            self.accepted,
            self.first_rejected,
            self.bonus,
        )
        return table[roles]


@dataclass(frozen=True)
class Branch:
    """The rest of a rejected draft: the target's distributions there are known, though the text
    went another way."""

    tokens: list[int]  # the text up to the rejected token, then the drafted ones
    begin: int  # first position behind the rejected token


class TrainedRow(NamedTuple):
    """A text to train on."""

    tokens: list[int]
    weights: np.ndarray  # [len(tokens)] float32, of the predicted tokens

    def cut(self, length: int) -> TrainedRow:
        return TrainedRow(self.tokens[:length], self.weights[:length])


def roles_of(num_drafted: int, accepted: int, committed: int) -> list[Role]:
    """Roles of the tokens that one round committed, which trimming may have cut short."""
    last = Role.FIRST_REJECTED if accepted < num_drafted else Role.BONUS
    return [*[Role.ACCEPTED] * accepted, last][:committed]


def branch_of(before: Sequence[int], drafted: Sequence[int], accepted: int) -> Branch | None:
    """`before` is all text before the round; None where nothing was drafted behind the first
    rejected token, or where it is not known what."""
    if accepted + 1 >= len(drafted) or UNLOGGED in drafted:
        return None
    return Branch([*before, *drafted], len(before) + accepted + 1)


def text_row(tokens: list[int], roles: np.ndarray, weights: RoleWeights) -> TrainedRow:
    return TrainedRow(tokens, weights.of(roles))


def branch_row(branch: Branch, weights: RoleWeights) -> TrainedRow:
    behind = np.arange(len(branch.tokens)) >= branch.begin
    return TrainedRow(
        branch.tokens, np.where(behind, weights.later_rejected, 0.0).astype(np.float32)
    )


def trained_text(row: TrainedRow) -> TrainedText:
    return TrainedText(torch.tensor(row.tokens, dtype=torch.int64), torch.from_numpy(row.weights))
