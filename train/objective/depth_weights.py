"""How much each depth of each round counts, from what is known before any gradient: the depth
itself, or what the draft would do with the text now.

A round whose first draft is at position a drafts the token at a + s at depth s. B rows of L tokens,
S depths. Published for blocks; here every position of a text begins a round, and a language model,
which drafts alike at every depth, adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from draftsmith.train.objective.rounds_of_text import by_position, by_round

# A row without any weight would not be measured either.
LEAST = 1e-6


class Judged(NamedTuple):
    """What the draft does with a text's tokens now, [B, L, S] by the token's position and depth,
    without gradients."""

    keep: torch.Tensor  # chance that the token is kept, given that the target wrote it
    confidence: torch.Tensor  # q of the token
    # bool: the token is trained at this depth; elsewhere the other two mean nothing
    known: torch.Tensor
    begun: torch.Tensor  # bool: the round that drafts it at this depth begins in the same text

    def weighted(self, rounds: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Weights [B, L, S] by round -> by position, in the type of `like`."""
        return torch.where(self.begun, by_position(rounds), 0.0).clamp(min=LEAST).to(like.dtype)


Judge = Callable[[], Judged]


class StepWeighting(Protocol):
    def factors(self, like: torch.Tensor, num_steps: int, judge: Judge) -> torch.Tensor:
        """[..., S], to be broadcast to [B, L, S] and multiplied with the weights `like` [B, L].
        `judge` costs a pass through both heads and is called by those who need it."""
        ...

    def scale(self, num_steps: int) -> float:
        """What a trained position counts in all, at most: the loss is divided by it."""
        ...


@dataclass(frozen=True)
class Exponential:
    """decay**s: 1 counts all depths alike."""

    decay: float

    def factors(self, like: torch.Tensor, num_steps: int, judge: Judge) -> torch.Tensor:
        return torch.tensor(
            [self.decay**depth for depth in range(num_steps)], dtype=like.dtype, device=like.device
        )

    def scale(self, num_steps: int) -> float:
        return sum(self.decay**depth for depth in range(num_steps))


@dataclass(frozen=True)
class ExpectedPrefix:
    """The chance that a round gets there: the product of the keep probabilities before. What is
    kept with probability c everywhere gets c**s."""

    def factors(self, like: torch.Tensor, num_steps: int, judge: Judge) -> torch.Tensor:
        judged = judge()
        # What is not trained (a prompt) stands whatever the draft thinks of it.
        kept = by_round(torch.where(judged.known, judged.keep, 1.0)).cumprod(dim=-1)
        reached = torch.cat([torch.ones_like(kept[..., :1]), kept[..., :-1]], dim=-1)
        return judged.weighted(reached, like)

    def scale(self, num_steps: int) -> float:
        return float(num_steps)


@dataclass(frozen=True)
class DPace:
    """D-PACE (arXiv:2605.18810): the derivative of the expected accepted length by the
    log-probability of the token, the sum over m >= s of the products of confidences up to m, each
    confidence c smoothed to (1 - a) c + a."""

    smoothing: float = 0.5  # a, as published

    def factors(self, like: torch.Tensor, num_steps: int, judge: Judge) -> torch.Tensor:
        judged = judge()
        smooth = (1 - self.smoothing) * judged.confidence + self.smoothing
        reached = by_round(torch.where(judged.known, smooth, 1.0)).cumprod(dim=-1) * by_round(
            judged.known
        )
        return judged.weighted(reached.flip(-1).cumsum(dim=-1).flip(-1), like)

    def scale(self, num_steps: int) -> float:
        return float(num_steps)


def step_weighting(name: str, decay: float) -> StepWeighting:
    """By the names of `UnrollConfig.weights`; `decay` is of the exponential ones."""
    return {
        "uniform": Exponential(1.0),
        "exponential": Exponential(decay),
        "expected-prefix": ExpectedPrefix(),
        "d-pace": DPace(),
    }[name]


def folded(factors: torch.Tensor, num_steps: int) -> torch.Tensor:
    """[..., S] -> [..., num_steps]: the last step of an unroll that ends early stands for all
    depths after it."""
    return torch.cat(
        [factors[..., : num_steps - 1], factors[..., num_steps - 1 :].sum(dim=-1, keepdim=True)],
        dim=-1,
    )
