"""Drafted positions of served texts, and a draft's states there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftsmith.distill.buffer.traffic import ServedText
from draftsmith.distill.gate.logged import LoggedPosition
from draftsmith.drafters.interface import UnrollBatch, UnrolledStep, head_of
from draftsmith.kernels.products.float32_products import multiply
from draftsmith.train.objective.unrolled_loss import Unrollable


class Position(NamedTuple):
    row: int  # of the batch
    logged: LoggedPosition

    @property
    def absolute(self) -> int:
        return self.logged.record.position + self.logged.depth


def positions_of(text: ServedText, row: int, *, max_depth: int, max_length: int) -> list[Position]:
    """Accepted positions and the first rejected one of each round."""
    found = []
    for record in text.records:
        known = min(len(record.p), record.accepted + 1, max_depth, max_length - record.position)
        found += [Position(row, LoggedPosition(record, depth)) for depth in range(known)]
    return found


@dataclass(frozen=True)
class DraftedPositions:
    """A draft's states at n positions."""

    drafter: Unrollable
    steps: Sequence[UnrolledStep]
    hidden: torch.Tensor  # [n, H], 0 where nothing was drafted
    number: torch.Tensor  # [n] of the step. A language model has one step for all depths.
    is_drafted: torch.Tensor  # [n] bool

    @classmethod
    def of(
        cls, drafter: Unrollable, batch: UnrollBatch, positions: Sequence[Position]
    ) -> DraftedPositions:
        steps = list(drafter.unroll(batch))
        device = batch.input_ids.device
        row, depth, absolute = torch.tensor(
            [(one.row, one.logged.depth, one.absolute) for one in positions], device=device
        ).T
        number = depth.clamp(max=len(steps) - 1)
        hidden = steps[0].hidden.new_zeros(len(positions), steps[0].hidden.shape[-1])
        is_drafted = torch.zeros(len(positions), dtype=torch.bool, device=device)
        for index, step in enumerate(steps):
            column = absolute - step.offset
            # The last known position may lie one behind the text when a stop string cut it.
            is_inside = (number == index) & (column >= 0) & (column < step.valid.shape[1])
            mine = is_inside.nonzero()[:, 0]
            hidden[mine] = step.hidden[row[mine], column[mine]]
            is_drafted[mine] = step.valid[row[mine], column[mine]]
        return cls(drafter, steps, hidden, number, is_drafted)

    def logits(self, part: slice) -> torch.Tensor:
        """[n, Vd] float32 of the positions of `part`."""
        hidden, number = self.hidden[part], self.number[part]
        heads = [head_of(step, self.drafter) for step in self.steps]
        if all(head is heads[0] for head in heads):
            return multiply(hidden, heads[0].T).float()
        logits = hidden.new_empty(len(hidden), heads[0].shape[0])
        for index, head in enumerate(heads):
            mine = number == index
            logits[mine] = multiply(hidden[mine], head.T)
        return logits.float()
