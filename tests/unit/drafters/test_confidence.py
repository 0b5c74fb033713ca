"""DSpark's guess of its own alpha: what it reads, when a round ends by it, and that the draft it is
about has no part in it."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from draftsmith.drafters.blocks.dspark import Dspark
from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.options import DsparkOptions
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import SamplingRows
from tests.first_rounds import first_round
from tests.noise import noisy
from tests.unrolled import unroll_batch

TARGET_DTYPE = torch.float64
K = 4
ROWS = 64
TEXT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def drafter(target) -> Dspark:
    made = Dspark.create(DsparkOptions(block_size=K, markov_rank=6), target, seed=0)
    made = made.to(device=target.device, dtype=torch.float64)
    noisy(made, 2)
    # The guess must vary with the token before it, and end rounds at every depth.
    made.confidence_head.proj.weight.data[:, :-6] *= 0.2
    made.confidence_head.proj.weight.data[:, -6:] *= 3.0
    made.confidence_head.proj.bias.data.fill_(1.0)
    return made


@torch.no_grad()
def propose(drafter: Dspark, target: Target, least_survival: float) -> Proposal:
    """ROWS rows over one text, each with a seed of its own."""
    sampling = SamplingRows.of([1.0] * ROWS, top_k=[3] * ROWS)
    inputs = first_round(
        drafter, target, [TEXT] * ROWS, [K] * ROWS, sampling=sampling, least_survival=least_survival
    )
    return drafter.propose(inputs)


@torch.no_grad()
def survival(drafter: Dspark, target: Target, drafts: list[int]) -> list[float]:
    """By unrolling: the product of the guesses for the first, the first two, ... of the drafts
    after TEXT."""
    ids = torch.tensor([[*TEXT, *drafts]])
    batch = unroll_batch(drafter, target, ids, len(drafts))
    guesses = [
        torch.sigmoid(step.confidence[0, len(TEXT) - 2 + depth])
        for depth, step in enumerate(drafter.unroll(batch))
    ]
    return torch.stack(guesses).cumprod(0).tolist()


def test_a_round_ends_where_the_guess_says(drafter, target):
    free, least = propose(drafter, target, 0.0), 0.15
    ended = propose(drafter, target, least)
    assert (free.lengths == K).all()
    found: set[int] = set()
    for row, length in enumerate(ended.lengths.tolist()):
        whole = free.tokens[row].tolist()
        chances = survival(drafter, target, whole)
        assert length == sum(chance >= least for chance in chances)
        # What is offered is drawn from the very distributions, with the very numbers.
        assert ended.tokens[row, :length].tolist() == whole[:length]
        torch.testing.assert_close(ended.logits[row, :length], free.logits[row, :length])
        found.add(length)
    assert len(found) >= 3, "rows must end at several depths for this to mean anything"


def test_whether_a_draft_is_offered_is_known_before_it_is_drawn(drafter, target):
    """Rows with the same drafts so far all offer one more, or none does (invariant 4)."""
    proposal = propose(drafter, target, 0.15)
    offers = defaultdict(set)
    for tokens, length in zip(proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True):
        for depth in range(min(length + 1, K)):
            offers[tuple(tokens[:depth])].add(depth < length)
    assert all(len(decisions) == 1 for decisions in offers.values())
    assert {True, False} == {decision for decisions in offers.values() for decision in decisions}


def test_no_guess_no_end(drafter, target):
    assert (propose(drafter, target, 1.0).lengths == 0).all()
    state = {key: tensor for key, tensor in drafter.state_dict().items() if "confidence" not in key}
    plain = Dspark(drafter.config, target, drafter.taps, drafter.shape._replace(confidence=""))
    plain.to(torch.float64).load_state_dict(state)
    assert (propose(plain, target, 1.0).lengths == K).all()
