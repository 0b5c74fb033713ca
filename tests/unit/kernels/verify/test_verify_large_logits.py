"""Large logits, which low temperatures and offsets make: the acceptance test is exact to the
rounding of a distribution, not of a logit.

A float32 near 1250 has a grid of 1.2e-4. Uniforms are picked that miss their threshold by less, and
float64 says what is right.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from draftsmith.kernels.sampling.random_streams import Purpose, uniform
from draftsmith.kernels.verify.block import verify_block
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.kernels.verify.residual import log_distribution
from draftsmith.kernels.verify.tree import verify_tree
from draftsmith.kernels.verify.verdict import DraftTree
from tests.draft_trees import sibling_distribution

SIZE, FIRST, SECOND = 33, 3, 20
NEAREST, FARTHEST = 5e-6, 5e-5  # of u / threshold - 1


class Close(NamedTuple):
    seeds: torch.Tensor  # [B], whose uniforms nearly meet the threshold
    below: torch.Tensor  # [B] bool, on which side


def distributions(offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two distributions [1, V] with thresholds between 0 and 1 at `FIRST` and `SECOND`, so that
    either child may be kept."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(1, SIZE, generator=generator) + offset for _ in range(2))
    q[0, [FIRST, SECOND]] = torch.tensor([3.0, 2.5]) + offset
    p[0, [FIRST, SECOND]] = torch.tensor([2.0, 2.2]) + offset
    return p, q


def close(thresholds: list[float]) -> Close:
    """Seeds whose last uniform nearly meets the last threshold, and whose earlier ones lie above
    theirs."""
    seeds = torch.arange(2_000_000)
    here = torch.zeros_like(seeds)
    *earlier, last = thresholds
    for number, threshold in enumerate(earlier):
        above = uniform(seeds, here, Purpose.ACCEPT, here + number) > threshold + 1e-3
        seeds, here = seeds[above], here[above]
    distance = uniform(seeds, here, Purpose.ACCEPT, here + len(earlier)) / last - 1
    chosen = ((distance.abs() > NEAREST) & (distance.abs() < FARTHEST)).nonzero()[:20, 0]
    return Close(seeds[chosen], distance[chosen] < 0)


def check_both_sides(given: Close) -> None:
    assert len(given.seeds) >= 10 and given.below.any() and not given.below.all()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("way", ["chain", "block", "without q", "tree"])
def test_the_first_test_is_exact(way: str, impl: str, device: torch.device) -> None:
    p, q = distributions(1250.0)
    probs_p, probs_q = log_distribution(p.double()).exp(), log_distribution(q.double()).exp()
    threshold = float(probs_p[0, FIRST] / (1 if way == "without q" else probs_q[0, FIRST]))
    given = close([threshold])
    check_both_sides(given)
    rows = len(given.seeds)
    seeds, zeros = given.seeds.to(device), torch.zeros(rows, dtype=torch.int64, device=device)
    both, drafts, lengths = (
        p.to(device).expand(2 * rows, -1),
        torch.full_like(zeros, FIRST)[:, None],
        zeros + 1,
    )
    q = q.to(device)
    if way == "tree":
        q_rows = torch.tensor([0, -1], device=device).expand(rows, 2)
        verdict = verify_tree(
            both, DraftTree(drafts, zeros[:, None] - 1, lengths), q, q_rows, seeds, zeros, impl=impl
        )
    else:
        verify = verify_block if way == "block" else verify_chain
        told = None if way == "without q" else q.expand(rows, 1, SIZE)
        verdict = verify(both, drafts, lengths, told, seeds, zeros, impl=impl)
    assert torch.equal(verdict.accepted.cpu() == 1, given.below)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_later_siblings_test_is_exact(impl: str, device: torch.device) -> None:
    p, q = distributions(1250.0)
    keep = sibling_distribution(
        log_distribution(p.double())[0],
        log_distribution(q.double())[0],
        torch.tensor([FIRST, SECOND]),
    ).keep.tolist()
    given = close(keep)
    check_both_sides(given)
    rows = len(given.seeds)
    seeds, zeros = given.seeds.to(device), torch.zeros(rows, dtype=torch.int64, device=device)
    tokens = torch.tensor([FIRST, SECOND], device=device).expand(rows, 2)
    q_rows = torch.tensor([0, -1, -1], device=device).expand(rows, 3)
    tree = DraftTree(tokens, torch.full_like(tokens, -1), zeros + 2)
    verdict = verify_tree(
        p.to(device).expand(3 * rows, -1), tree, q.to(device), q_rows, seeds, zeros, impl=impl
    )
    assert torch.equal(verdict.nodes[:, 0].cpu() == 1, given.below)
