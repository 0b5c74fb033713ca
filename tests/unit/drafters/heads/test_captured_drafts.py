"""Drafts from a captured forward are those that the head's own forward gives, before and after new
weights are swapped in."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from draftsmith.drafters.compiled.captured import capture_forwards
from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from tests.first_rounds import first_round
from tests.noise import noisy
from tests.small_drafts import small_draft

KINDS = ("eagle3 subset", "eagle1", "mtp", "draft-lm")
ROWS, K = 3, 4


@pytest.fixture(params=KINDS)
def drafter(request, target):
    return small_draft(request.param, target).eval()


def draft(drafter, target: Target, lengths: Sequence[int], num_draft: Sequence[int]) -> Proposal:
    """From nothing, behind texts of noise."""
    generator = torch.Generator().manual_seed(5)
    texts = [
        torch.randint(3, target.vocab_size, (length,), generator=generator).tolist()
        for length in lengths
    ]
    with torch.inference_mode():
        return drafter.propose(first_round(drafter, target, texts, num_draft))


def assert_same(found: Proposal, expected: Proposal) -> None:
    assert found.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)


def assert_captured(drafter) -> None:
    assert drafter.lm.captured if drafter.family == "draft-lm" else drafter._captured is not None


def own_forward(drafter):
    """The same draft, not captured."""
    if drafter.family == "draft-lm":
        return FAMILIES["draft-lm"](drafter.model, "same weights")
    fresh = copy.copy(drafter)
    fresh._captured = None
    return fresh


def test_drafts_from_a_captured_forward_are_the_same(drafter, target):
    """Before and after new weights are written in place."""
    capture_forwards(target, drafter)
    assert_captured(drafter)
    before = draft(drafter, target, [7, 2, 12], [K] * ROWS)
    for lengths, num_draft in (([7, 2, 12], [K, K, K]), ([9], [K]), ([3, 8, 5], [1, K, 0])):
        found = draft(drafter, target, lengths, num_draft)
        assert_same(found, draft(own_forward(drafter), target, lengths, num_draft))
    noisy(drafter, 9, 0.05)
    after = draft(drafter, target, [7, 2, 12], [K] * ROWS)
    assert not torch.allclose(after.logits, before.logits, atol=0.1)
    assert_same(after, draft(own_forward(drafter), target, [7, 2, 12], [K] * ROWS))
