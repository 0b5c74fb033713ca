"""A divergence of the draft's distribution from the target's, over every unrolled depth. Shared by
offline and online training.

B rows, L tokens per row, S unrolled steps, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from draftsmith.drafters.interface import TextBatch, TrainedDrafter, UnrolledStep
from draftsmith.kernels.divergence.fused import Divergence, divergence
from draftsmith.kernels.divergence.kind import FORWARD_KL, DivergenceKind
from draftsmith.train.objective.teacher import TargetSignals, TargetSource


class PredictedStep(NamedTuple):
    """One unrolled step on the positions that count. R rows."""

    hidden: torch.Tensor  # [R, H] draft states, what the draft head multiplies
    tokens: torch.Tensor  # [R] the tokens of the text there
    weights: torch.Tensor  # [R]
    row: torch.Tensor  # [R] batch row
    position: torch.Tensor  # [R] position of the predicted token
    head: torch.Tensor | None = None  # [Vd, H] of this step alone


class StepSums(NamedTuple):
    """Weighted sums over the trained positions, one entry per step; divide by `weight`."""

    weight: torch.Tensor  # [S]
    divergence: torch.Tensor  # [S]
    alpha: torch.Tensor  # [S] sum_v min(p_v, q_v)
    outside: torch.Tensor  # [S] target mass outside the draft vocabulary


class UnrolledLoss(NamedTuple):
    # scalar: sum over steps and positions of factor * weight * divergence
    total: torch.Tensor
    scale: float  # total / (scale * weights.sum()) is the token mean
    sums: StepSums
    # [B, L, S] chance that the text's token at this position is kept when drafted at depth s; 0
    # elsewhere. None: distributions are sparse.
    keep: torch.Tensor | None

    def mean(self, count: torch.Tensor | float) -> torch.Tensor:
        """Loss a token, of `count` of them: the value that a step descends on, offline and
        online."""
        return self.total / (self.scale * count)


def unrolled_loss(
    drafter: TrainedDrafter,
    source: TargetSource,
    text: TextBatch,
    *,
    num_steps: int,
    decay: float,
    kind: DivergenceKind = FORWARD_KL,
) -> UnrolledLoss:
    """Loss over the unroll, in which depth s counts decay**s. The target's signals are read once,
    the draft runs once per step. Gradients reach the draft only."""
    with torch.no_grad():
        signals = source.read(text, drafter.taps)
    steps = list(drafter.unroll(text.unrolled(signals.taps, num_steps)))
    predicted = [select(step, text) for step in steps]
    factors = step_factors(decay, num_steps, len(steps))
    weights = torch.cat([factor * one.weights for factor, one in zip(factors, predicted)])
    result = _divergence(drafter, signals, predicted, weights, kind)
    # The zero keeps every rank's graph alike when a rank has no trained position at some depth.
    total = (
        result.loss
        + confidence_loss(steps, predicted, result.alpha, weights)
        + 0.0 * sum(step.hidden.sum() for step in steps)
    )
    sizes = [len(one.weights) for one in predicted]
    keep = None
    if result.keep is not None:
        parts = zip(result.keep.split(sizes), predicted, strict=True)
        keep = torch.stack([scatter(kept, one, text.weights) for kept, one in parts], dim=-1)
    return UnrolledLoss(total, sum(factors), _sums(result, predicted, sizes), keep)


def select(step: UnrolledStep, text: TextBatch) -> PredictedStep:
    """The positions of this step that are valid and have weight."""
    weights = text.weights[:, step.offset :]
    wanted = step.valid[:, : weights.shape[1]] & (weights > 0)
    if text.segments is not None:
        # Nothing is drafted across the end of a text.
        wanted = wanted & (text.segments[:, step.offset :] == text.segments[:, : weights.shape[1]])
    row, column = wanted.nonzero(as_tuple=True)
    position = column + step.offset
    return PredictedStep(
        hidden=step.hidden[row, column],
        tokens=text.input_ids[row, position],
        weights=text.weights[row, position],
        row=row,
        position=position,
        head=step.head,
    )


def scatter(values: torch.Tensor, predicted: PredictedStep, like: torch.Tensor) -> torch.Tensor:
    """[R] values of a step -> [B, L], 0 where nothing was predicted."""
    spread = torch.zeros_like(like, dtype=values.dtype)
    spread[predicted.row, predicted.position] = values.detach()
    return spread


def step_factors(decay: float, num_steps: int, num_unrolled: int) -> list[float]:
    """Weight of each step; the last one of an unroll that ends early stands for all depths after
    it."""
    factors = [decay**depth for depth in range(num_steps)]
    return [*factors[: num_unrolled - 1], sum(factors[num_unrolled - 1 :])]


def _divergence(
    drafter: TrainedDrafter,
    signals: TargetSignals,
    predicted: Sequence[PredictedStep],
    weights: torch.Tensor,
    kind: DivergenceKind,
) -> Divergence:
    """Divergence of all steps, at once where one head is theirs."""
    if all(one.head is None for one in predicted):
        return _of_one_head(drafter, signals, predicted, weights, kind)
    parts = weights.split([len(one.weights) for one in predicted])
    found = [
        _of_one_head(drafter, signals, [one], part, kind)
        for one, part in zip(predicted, parts, strict=True)
    ]
    # The zero keeps every rank's graph alike when a rank has no trained position at some depth.
    heads = sum(one.head[0].sum() for one in predicted if one.head is not None)
    rows = zip(*(result[1:] for result in found), strict=True)
    return Divergence(
        sum(result.loss for result in found) + 0.0 * heads,
        *(None if values[0] is None else torch.cat(values) for values in rows),
    )


def _of_one_head(
    drafter: TrainedDrafter,
    signals: TargetSignals,
    predicted: Sequence[PredictedStep],
    weights: torch.Tensor,
    kind: DivergenceKind,
) -> Divergence:
    """Divergence of steps with one head at once: a call holds a gradient as large as the head until
    backward. Rows go in by the position they predict, so that what all depths
    draft for one is held against its distribution, computed once."""
    row, position = (
        torch.cat([one.row for one in predicted]),
        torch.cat([one.position for one in predicted]),
    )
    order = (row * (position.max() + 1) + position).argsort(stable=True) if len(row) else row
    hidden = torch.cat([one.hidden for one in predicted])[order]
    head = drafter.head_weight() if predicted[0].head is None else predicted[0].head
    result = divergence(
        kind,
        hidden,
        head,
        signals.distributions(row[order], position[order]),
        weights[order],
        vocab_map=drafter.vocab_map,
        tokens=torch.cat([one.tokens for one in predicted])[order],
    )
    back = order.argsort()
    return Divergence(
        result.loss, *(None if values is None else values[back] for values in result[1:])
    )


def _sums(result: Divergence, predicted: Sequence[PredictedStep], sizes: Sequence[int]) -> StepSums:
    def of(values: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [
                (part * one.weights).sum()
                for part, one in zip(values.split(sizes), predicted, strict=True)
            ]
        )

    weight = torch.stack([one.weights.sum() for one in predicted])
    return StepSums(weight, of(result.rows.detach()), of(result.alpha), of(result.outside))


def confidence_loss(
    steps: Sequence[UnrolledStep],
    predicted: Sequence[PredictedStep],
    alpha: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum of the binary cross entropies of the draft's confidences; 0 of drafts without
    any. alpha and weights [sum of R]."""
    guesses = [
        step.confidence[one.row, one.position - step.offset]
        for step, one in zip(steps, predicted)
        if step.confidence is not None
    ]
    if not guesses:
        return weights.new_zeros(())
    logits = torch.cat(guesses)
    # Under autocast the guesses come in bfloat16, too coarse for chances near 1.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = binary_cross_entropy_with_logits(logits, alpha.to(logits.dtype), reduction="none")
    return (weights * losses).sum()
