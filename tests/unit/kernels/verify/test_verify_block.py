"""Block verification: joint distributions over whole generations."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.sampling.random_streams import Purpose, round_seeds, sample
from draftsmith.kernels.statistics import g_test
from draftsmith.kernels.verify.block import verify_block

FALSE_ALARM = 1e-6  # seeds are fixed, so that a test passes or fails for good


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def target_distribution(p: torch.Tensor, depth: int) -> torch.Tensor:
    """The joint distribution of `depth` + 1 tokens of a Markov target p [V + 1, V], whose last row
    is the start."""
    distribution, size = p[-1], p.shape[1]
    for _ in range(depth):
        distribution = distribution[..., None] * p[:size]
    return distribution


def generations(p: torch.Tensor, q: torch.Tensor, rows: int, *, fresh: bool) -> torch.Tensor:
    """Four tokens [rows, 4] of a Markov pair by rounds of three drafts; `fresh` noise is the
    round's, else the request's."""
    size = p.shape[1]
    seeds = torch.arange(rows)
    tokens, counts = torch.full((rows, 9), size), torch.zeros(rows, dtype=torch.int64)
    while bool((counts < 4).any()):
        state = torch.where(
            counts > 0, tokens.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0], size
        )
        noise = round_seeds(seeds, counts) if fresh else seeds
        states, drafts = [state], []
        for step in range(3):
            drafts.append(sample(q[states[-1]], noise, counts + step, Purpose.DRAFT))
            states.append(drafts[-1])
        visited = torch.stack(states, dim=1)
        verdict = verify_block(
            p[visited.flatten()],
            torch.stack(drafts, dim=1),
            torch.full((rows,), 3),
            q[visited[:, :3]],
            seeds,
            counts,
        )
        running = (counts < 4).nonzero()[:, 0]
        places = counts[running, None] + torch.arange(4)
        kept = torch.arange(4) <= verdict.accepted[running, None]
        tokens[running] = tokens[running].scatter(
            1, places, torch.where(kept, verdict.tokens[running], tokens[running].gather(1, places))
        )
        counts[running] += verdict.accepted[running] + 1
    return tokens[:, :4]


@pytest.mark.parametrize("fresh", [True, False])
def test_rounds_need_noise_of_their_own(fresh: bool) -> None:
    """With the request's own noise, what a block has rejected after looking at it would be drafted
    again."""
    p, q = normal(10, 5, 4, scale=1.5), normal(11, 5, 4, scale=1.5)
    tokens = generations(p, q, 60_000, fresh=fresh)
    cells = (tokens * torch.tensor([64, 16, 4, 1])).sum(dim=1)
    fit = g_test(
        torch.bincount(cells, minlength=256),
        target_distribution(p.double().softmax(-1), 3).flatten(),
    )
    assert (fit.p_value > FALSE_ALARM) == fresh
