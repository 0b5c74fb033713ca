"""Training on served text: the trainer's objective, at the positions that verification visited.

Fresh texts are mixed with a reservoir of older ones, so that what the draft knew is not unlearned.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftsmith.distill.config import POSITIONS, LearnConfig
from draftsmith.distill.traffic import ServedText, branches
from draftsmith.drafters.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.divergence_kind import kind_of
from draftsmith.train.objective import UnrolledLoss, unrolled_loss
from draftsmith.train.place import fast_at_bf16
from draftsmith.train.position_weights import Exponential
from draftsmith.train.roles import RoleWeights, Row, branch_row, padded_rows, text_row
from draftsmith.train.teacher import LiveTeacher

# So many steps in a row without a finite gradient mean that the candidate is lost.
MAX_BROKEN_STEPS = 3


@dataclass(frozen=True)
class UpdateReport:
    steps: int
    broken: int  # steps skipped because their gradient was not finite
    loss: float  # token mean of the divergence over the depths, before the last step
    alpha: list[float]  # of each depth, on the same batch
    tokens: int  # trained positions in the update


@dataclass
class Reservoir:
    """A uniform sample of all texts ever seen, in bounded memory (Vitter's algorithm R). Laws are not kept."""

    capacity: int
    texts: list[ServedText] = field(default_factory=list)
    seen: int = 0

    def add(self, text: ServedText, rng: random.Random) -> None:
        self.seen += 1
        if len(self.texts) < self.capacity:
            self.texts.append(text.slim())
        elif (place := rng.randrange(self.seen)) < self.capacity:
            self.texts[place] = text.slim()


class Learner:
    """Owns the candidate's optimizer and the reservoir. Randomness depends on `seed` and the number of the update alone."""

    def __init__(self, drafter: torch.nn.Module, target: Target, config: LearnConfig, *, seed: int):
        check(config)
        self.drafter, self.target, self.config, self.seed = drafter, target, config, seed
        self.is_bf16_fast = fast_at_bf16(target.device)
        self.reservoir = Reservoir(config.reservoir)
        self.weights = role_weights(config.positions)
        self.updates = self.steps = 0
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.AdamW:
        trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.config.lr, weight_decay=self.config.weight_decay)

    def restart(self, weights: dict[str, torch.Tensor]) -> None:
        """From other weights, with a fresh optimizer."""
        self.drafter.load_state_dict(weights)
        self.steps = 0
        self.optimizer = self._new_optimizer()

    def update(self, fresh: Sequence[ServedText]) -> UpdateReport:
        """A bounded number of steps, however much came in; every fresh text then may enter the reservoir."""
        rng = random.Random(f"{self.seed} {self.updates}")
        queue = list(fresh)
        rng.shuffle(queue)
        broken = in_a_row = tokens = 0
        loss, alpha = math.nan, [math.nan]
        for step in range(self.config.steps):
            rows = self._rows(self._batch(queue, step, rng), rng)
            if not any(row.weights.any() for row in rows):
                continue
            unrolled = self._backward(rows)
            if self._step():
                loss, alpha = summary(unrolled)
                in_a_row = 0
            else:
                broken, in_a_row = broken + 1, in_a_row + 1
            tokens += int(sum((row.weights > 0).sum() for row in rows))
            if in_a_row == MAX_BROKEN_STEPS:
                break
        for text in fresh:
            self.reservoir.add(text, rng)
        self.updates += 1
        return UpdateReport(self.config.steps, broken, loss, alpha, tokens)

    def _batch(self, queue: list[ServedText], step: int, rng: random.Random) -> list[ServedText]:
        num_old = min(round(self.config.replay * self.config.batch), len(self.reservoir.texts))
        num_fresh = self.config.batch - num_old
        # Few fresh texts are not repeated within a batch; over the steps all get their turn.
        picked = [queue[(step * num_fresh + index) % len(queue)] for index in range(min(num_fresh, len(queue)))]
        return picked + rng.sample(self.reservoir.texts, num_old)

    def _rows(self, texts: Sequence[ServedText], rng: random.Random) -> list[Row]:
        rows = [text_row(text.tokens, text.roles, self.weights) for text in texts]
        if self.weights.later_rejected:
            found = [branch for text in texts for branch in branches(text)]
            rows += [branch_row(branch, self.weights) for branch in rng.sample(found, min(self.config.branches, len(found)))]
        return [row.cut(min(self.config.max_length, self.target.max_positions)) for row in rows]

    def _backward(self, rows: Sequence[Row]) -> UnrolledLoss:
        text = padded_rows(rows, self.target.device)
        unrolled = unrolled_loss(
            self.drafter,
            LiveTeacher(self.target),
            text,
            num_steps=self.config.unroll,
            weighting=Exponential(self.config.step_decay),
            kind=kind_of(self.config.divergence),
        )
        self.optimizer.zero_grad(set_to_none=True)
        (unrolled.total / (unrolled.scale * text.weights.sum())).backward()
        return unrolled

    def _step(self) -> bool:
        """False, and nothing changed, when the gradient is not finite."""
        trained = self.optimizer.param_groups[0]["params"]
        norm = torch.nn.utils.clip_grad_norm_(trained, self.config.clip)
        if not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            return False
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = self.config.lr * min(1.0, self.steps / max(1, self.config.warmup))
        self.optimizer.step()
        return True


def summary(unrolled: UnrolledLoss) -> tuple[float, list[float]]:
    sums = unrolled.sums
    weight = sums.weight.clamp(min=1e-9)
    loss = float(sums.divergence.sum() / weight.sum())
    return loss, (sums.alpha / weight).tolist()


def role_weights(positions: Sequence[str]) -> RoleWeights:
    """Each of the named ones counts alike."""
    return RoleWeights(**{name.replace("-", "_"): float(name in positions) for name in POSITIONS})


def check(config: LearnConfig) -> None:
    kind_of(config.divergence)
    for name in config.positions:
        if name not in POSITIONS:
            raise UserError(f"learn.positions holds {name!r}; choose from {', '.join(POSITIONS)}")
    if not config.positions:
        raise UserError(f"learn.positions is empty; choose from {', '.join(POSITIONS)}")
    if not 0 <= config.replay < 1:
        raise UserError(f"learn.replay is {config.replay}; it must be at least 0 and less than 1")
    for name, value in (("batch", config.batch), ("steps", config.steps), ("fresh", config.fresh), ("unroll", config.unroll)):
        if value < 1:
            raise UserError(f"learn.{name} is {value}; it must be at least 1")
    if not config.lr > 0 or not math.isfinite(config.lr):
        raise UserError(f"learn.lr is {config.lr}; it must be a positive number such as 2e-4")
