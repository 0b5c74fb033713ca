"""Drafts from a captured forward are those that the head's own forward gives, before and after new
weights are swapped in."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from draftsmith.drafters.compiled.captured import capture_forwards
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import DraftLmOptions, Eagle1Options, Eagle3Options, MtpOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import SamplingRows

KINDS = {
    "eagle3": ("eagle3", Eagle3Options()),
    "eagle3 subset": ("eagle3", Eagle3Options(draft_vocab_size=120)),
    "eagle1": ("eagle1", Eagle1Options()),
    "mtp": ("mtp", MtpOptions()),
    "draft-lm": ("draft-lm", DraftLmOptions(num_layers=2, hidden_size=24, num_attention_heads=2)),
}
ROWS, K = 3, 4


@pytest.fixture(params=KINDS)
def drafter(request, target):
    family, options = KINDS[request.param]
    counts = torch.randint(
        1, 1000, (target.vocab_size,), generator=torch.Generator().manual_seed(1)
    )
    made = FAMILIES[family].create(options, target, seed=0, token_counts=counts)
    scatter(made, seed=2)
    return made.eval()


@torch.no_grad()
def scatter(drafter: torch.nn.Module, *, seed: int) -> None:
    """Large random weights, written in place as a swap does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(
            noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + 0.1 * noise
        )


def draft(drafter, target: Target, lengths: Sequence[int], num_draft: Sequence[int]) -> Proposal:
    """From nothing; texts and taps are noise of their own."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, target.vocab_size, (sum(lengths),), generator=generator)
    pool = drafter.new_pool(64, 4, target.device, torch.float32)
    taps = torch.randn(
        sum(lengths) - len(lengths), len(drafter.taps) * target.hidden_size, generator=generator
    )
    inputs = DraftInputs(
        tokens=tokens,
        starts=torch.zeros(len(lengths), dtype=torch.int64),
        lengths=torch.tensor(lengths),
        taps=taps if drafter.taps else None,
        num_draft=torch.tensor(num_draft),
        sampling=SamplingRows.of(
            [1.0] * len(lengths), top_k=[0] * len(lengths), top_p=[1.0] * len(lengths), device="cpu"
        ),
        seeds=torch.arange(len(lengths)),
        pool=pool,
        block_tables=torch.randperm(60, generator=generator).view(ROWS, 20)[: len(lengths)],
        histories=[[0]] * len(lengths),
        request_ids=[str(row) for row in range(len(lengths))],
    )
    with torch.inference_mode():
        return drafter.propose(inputs)


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
    scatter(drafter, seed=9)
    after = draft(drafter, target, [7, 2, 12], [K] * ROWS)
    assert not torch.allclose(after.logits, before.logits, atol=0.1)
    assert_same(after, draft(own_forward(drafter), target, [7, 2, 12], [K] * ROWS))
