"""A divergence of the draft's law from the target's, over every unrolled depth. Shared by offline and online training.

B rows, L tokens a row, S unrolled steps, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from draftsmith.drafters.interface import UnrollBatch, UnrolledStep
from draftsmith.kernels.divergence import Divergence, divergence
from draftsmith.kernels.divergence_kind import FORWARD_KL, Kind
from draftsmith.train.teacher import Taught, Teacher
from draftsmith.train.weighted_text import WeightedText


class Unrollable(Protocol):
    """What training needs of a drafter."""

    taps: tuple[int, ...]

    @property
    def vocab_map(self) -> torch.Tensor | None: ...

    def head_weight(self) -> torch.Tensor: ...

    def unroll(self, batch: UnrollBatch): ...


class Predicted(NamedTuple):
    """One unrolled step on the positions that count. R rows."""

    hidden: torch.Tensor  # [R, H] draft states, what the draft head multiplies
    tokens: torch.Tensor  # [R] the tokens of the text there
    weights: torch.Tensor  # [R]
    row: torch.Tensor  # [R] batch row
    position: torch.Tensor  # [R] position of the predicted token


class StepSums(NamedTuple):
    """Weighted sums over the trained positions, one entry a step; divide by `weight`."""

    weight: torch.Tensor  # [S]
    divergence: torch.Tensor  # [S]
    alpha: torch.Tensor  # [S] sum_v min(p_v, q_v)
    outside: torch.Tensor  # [S] target mass outside the draft vocabulary


class UnrolledLoss(NamedTuple):
    total: torch.Tensor  # scalar: sum over steps s and positions of decay**s * weight * divergence
    scale: float  # sum over steps of decay**s; total / (scale * weights.sum()) is the token mean
    sums: StepSums
    keep: torch.Tensor  # [B, L, S] chance that the text's token at this position is kept when drafted at depth s; 0 elsewhere


def unrolled_loss(
    drafter: Unrollable, teacher: Teacher, text: WeightedText, *, num_steps: int, decay: float, kind: Kind = FORWARD_KL
) -> UnrolledLoss:
    """The teacher reads the text once, the draft once a step. Gradients reach the draft only."""
    with torch.no_grad():
        taught = teacher.read(text, drafter.taps)
    batch = UnrollBatch(input_ids=text.input_ids, attention_mask=text.attention_mask, taps=taught.taps, num_steps=num_steps)
    steps = list(drafter.unroll(batch))
    predicted = [select(step, text) for step in steps]
    factors = [decay**depth for depth in range(len(steps))]
    result = _divergence(drafter, taught, predicted, factors, kind)
    # The zero keeps every rank's graph alike when a rank has no trained position at some depth.
    total = result.loss + 0.0 * sum(step.hidden.sum() for step in steps)
    sizes = [len(one.weights) for one in predicted]
    keep = [scatter(kept, one, text.weights) for kept, one in zip(result.keep.split(sizes), predicted, strict=True)]
    return UnrolledLoss(total, sum(factors), _sums(result, predicted, sizes), torch.stack(keep, dim=-1))


def select(step: UnrolledStep, text: WeightedText) -> Predicted:
    """The positions of this step that are valid and have weight."""
    weights = text.weights[:, step.offset :]
    wanted = step.valid[:, : weights.shape[1]] & (weights > 0)
    row, column = wanted.nonzero(as_tuple=True)
    position = column + step.offset
    return Predicted(
        hidden=step.hidden[row, column],
        tokens=text.input_ids[row, position],
        weights=text.weights[row, position],
        row=row,
        position=position,
    )


def scatter(values: torch.Tensor, predicted: Predicted, like: torch.Tensor) -> torch.Tensor:
    """[R] values of a step -> [B, L], 0 where nothing was predicted."""
    spread = torch.zeros_like(like, dtype=values.dtype)
    spread[predicted.row, predicted.position] = values.detach()
    return spread


def _divergence(
    drafter: Unrollable, taught: Taught, predicted: Sequence[Predicted], factors: Sequence[float], kind: Kind
) -> Divergence:
    """Of all steps at once: a call holds a gradient as large as the draft head until backward."""
    return divergence(
        kind,
        torch.cat([one.hidden for one in predicted]),
        drafter.head_weight(),
        taught.laws(torch.cat([one.row for one in predicted]), torch.cat([one.position for one in predicted])),
        torch.cat([factor * one.weights for factor, one in zip(factors, predicted, strict=True)]),
        vocab_map=drafter.vocab_map,
        tokens=torch.cat([one.tokens for one in predicted]),
    )


def _sums(result: Divergence, predicted: Sequence[Predicted], sizes: Sequence[int]) -> StepSums:
    def of(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([(part * one.weights).sum() for part, one in zip(values.split(sizes), predicted, strict=True)])

    weight = torch.stack([one.weights.sum() for one in predicted])
    return StepSums(weight, of(result.rows.detach()), of(result.alpha), of(result.outside))
