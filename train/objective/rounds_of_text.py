"""Rounds expected on teacher-forced text, from its keep probabilities, and weights of the depths of
each round, from what is known before any gradient: the depth itself, or the draft's present
acceptance of the text.

A round whose first draft is at position a drafts the token at a + s at depth s. B rows of L tokens,
S depths. Weights are published for blocks; here every position of a text begins a round, and a
language model, which drafts alike at every depth, adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from draftsmith.kernels.acceptance import expected_rounds


def answers(keep: torch.Tensor, loss_mask: torch.Tensor) -> list[torch.Tensor]:
    """One [n, S] matrix for each stretch of n tokens that the target wrote, as `expected_rounds`
    takes it.

    `keep[j, s]` [L, S] is for the token at position j drafted at depth s. Entry [i, s] of the
    answer that begins at j0 is `keep[j0 + i + s, s]`: the round that decides its token i drafts the
    token at i + s at depth s. 0 past the answer's end.
    """
    return [align_to_round(keep[begin:end]) for begin, end in stretches(loss_mask)]


def stretches(loss_mask: torch.Tensor) -> list[tuple[int, int]]:
    """[begin, end) of each run of True in `loss_mask` [L]."""
    padded = torch.nn.functional.pad(loss_mask.int().cpu(), (1, 1))
    edges = padded.diff()
    begins = (edges == 1).nonzero()[:, 0].tolist()
    ends = (edges == -1).nonzero()[:, 0].tolist()
    return list(zip(begins, ends, strict=True))


def align_to_round(values: torch.Tensor) -> torch.Tensor:
    """[..., L, S] by the position of the drafted token -> by the round's first: [i, s] of it is [i
    + s, s], 0 past the end."""
    size, depths = values.shape[-2:]
    padded = torch.nn.functional.pad(values, (0, 0, 0, depths))
    return torch.stack(
        [padded[..., depth : depth + size, depth] for depth in range(depths)], dim=-1
    )


def align_to_position(values: torch.Tensor) -> torch.Tensor:
    """Inverse of `align_to_round`: [j, s] is [j - s, s], 0 where the round would have begun before
    the text."""
    size, depths = values.shape[-2:]
    padded = torch.nn.functional.pad(values, (0, 0, depths, 0))
    return torch.stack(
        [padded[..., depths - depth : depths - depth + size, depth] for depth in range(depths)],
        dim=-1,
    )


def deepen(keep: torch.Tensor, depths: int) -> torch.Tensor:
    """[..., S] -> [..., depths]. A drafter whose unroll ends early drafts alike at every later
    depth (a language model)."""
    missing = depths - keep.shape[-1]
    if missing <= 0:
        return keep[..., :depths]
    return torch.cat([keep, keep[..., -1:].expand(*keep.shape[:-1], missing)], dim=-1)


def predicted_tau(keep: torch.Tensor, loss_mask: torch.Tensor) -> float | None:
    """Tokens per round over a batch: keep [B, L, S], loss_mask [B, L]. None when the target wrote
    nothing."""
    tokens, rounds = 0, 0.0
    for row, mask in zip(keep.float().cpu(), loss_mask.cpu(), strict=True):
        for answer in answers(row, mask):
            tokens += len(answer)
            rounds += expected_rounds(answer)
    return tokens / rounds if rounds else None


# A row without any weight would not be measured either.
LEAST = 1e-6


class DepthStats(NamedTuple):
    """Statistics of the draft on a text's tokens, [B, L, S] by the token's position and depth,
    without gradients."""

    keep: torch.Tensor  # chance that the token is kept, given that the target wrote it
    confidence: torch.Tensor  # q of the token
    # bool: the token is trained at this depth; elsewhere the other two mean nothing
    known: torch.Tensor
    begun: torch.Tensor  # bool: the round that drafts it at this depth begins in the same text

    def weighted(self, rounds: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Weights [B, L, S] by round -> by position, in the type of `like`."""
        weights = torch.where(self.begun, align_to_position(rounds), 0.0)
        return weights.clamp(min=LEAST).to(like.dtype)


ReadStats = Callable[[], DepthStats]


class StepWeighting(Protocol):
    def factors(self, like: torch.Tensor, num_steps: int, read_stats: ReadStats) -> torch.Tensor:
        """[..., S], to be broadcast to [B, L, S] and multiplied with the weights `like` [B, L].
        `read_stats` costs a pass through both heads and is called only where it is needed."""
        ...

    def scale(self, num_steps: int) -> float:
        """Largest sum of the factors of a trained position, by which the loss is divided."""
        ...


@dataclass(frozen=True)
class Exponential:
    """decay**s: 1 counts all depths alike."""

    decay: float

    def factors(self, like: torch.Tensor, num_steps: int, read_stats: ReadStats) -> torch.Tensor:
        return torch.tensor(
            [self.decay**depth for depth in range(num_steps)], dtype=like.dtype, device=like.device
        )

    def scale(self, num_steps: int) -> float:
        return sum(self.decay**depth for depth in range(num_steps))


@dataclass(frozen=True)
class ExpectedPrefix:
    """Chance that a round reaches the depth: the product of the keep probabilities before it. A
    draft that is kept with probability c everywhere gets c**s."""

    def factors(self, like: torch.Tensor, num_steps: int, read_stats: ReadStats) -> torch.Tensor:
        stats = read_stats()
        # What is not trained (a prompt) counts as kept, whatever the draft's distribution.
        kept = align_to_round(torch.where(stats.known, stats.keep, 1.0)).cumprod(dim=-1)
        reached = torch.cat([torch.ones_like(kept[..., :1]), kept[..., :-1]], dim=-1)
        return stats.weighted(reached, like)

    def scale(self, num_steps: int) -> float:
        return float(num_steps)


@dataclass(frozen=True)
class DPace:
    """D-PACE (arXiv:2605.18810): the derivative of the expected accepted length by the
    log-probability of the token, the sum over m >= s of the products of confidences up to m, each
    confidence c smoothed to (1 - a) c + a."""

    smoothing: float = 0.5  # a, as published

    def factors(self, like: torch.Tensor, num_steps: int, read_stats: ReadStats) -> torch.Tensor:
        stats = read_stats()
        smooth = (1 - self.smoothing) * stats.confidence + self.smoothing
        reached = align_to_round(torch.where(stats.known, smooth, 1.0)).cumprod(dim=-1)
        reached = reached * align_to_round(stats.known)
        return stats.weighted(reached.flip(-1).cumsum(dim=-1).flip(-1), like)

    def scale(self, num_steps: int) -> float:
        return float(num_steps)


def step_weighting(name: str, decay: float) -> StepWeighting:
    """Weighting by its name in `UnrollConfig.weights`; `decay` is of the exponential one."""
    weightings: dict[str, StepWeighting] = {
        "uniform": Exponential(1.0),
        "exponential": Exponential(decay),
        "expected-prefix": ExpectedPrefix(),
        "d-pace": DPace(),
    }
    return weightings[name]


def folded(factors: torch.Tensor, num_steps: int) -> torch.Tensor:
    """[..., S] -> [..., num_steps]: the last step of an unroll that ends early stands for all
    depths after it."""
    return torch.cat(
        [factors[..., : num_steps - 1], factors[..., num_steps - 1 :].sum(dim=-1, keepdim=True)],
        dim=-1,
    )
