"""Every published layout: read as it is published, drafting what the published formulas draft in
plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.interface import (
    Proposal,
    TrainedDrafter,
    UnrollBatch,
    head_of,
)
from draftsmith.drafters.target.target import Target
from tests.first_rounds import first_round
from tests.published_drafts import DTYPE, LAYOUTS, Layout

K = 3
TEXT = torch.randint(3, 288, (13,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"), dtype=DTYPE)


def propose(drafter: TrainedDrafter, target: Target) -> Proposal:
    return drafter.propose(first_round(drafter, target, [TEXT], [K]))


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_published_draft_follows_its_formula(
    layout: Layout, target: Target, tmp_path: Path
) -> None:
    made = layout.make(target)
    made.write(tmp_path / "draft")
    drafter = checkpoint.load(tmp_path / "draft", target)
    assert drafter.family == layout.family
    proposal = propose(drafter, target)
    assert proposal.lengths.tolist() == [K] and proposal.logits is not None
    drafted = proposal.tokens[0].tolist()
    expected = layout.reference(made.config, made.tensors, target, TEXT, drafted)
    q = proposal.logits[0].double()
    ids = torch.arange(288) if drafter.vocab_map is None else drafter.vocab_map
    others = torch.ones(288, dtype=torch.bool).index_fill(0, ids, False)
    assert (q[:, others] == -torch.inf).all()
    torch.testing.assert_close(
        q[:, ids].log_softmax(-1), expected.log_softmax(-1), rtol=1e-4, atol=1e-4
    )
    checkpoint.save(drafter, tmp_path / "again", target)
    again = propose(checkpoint.load(tmp_path / "again", target), target)
    assert again.tokens.tolist() == proposal.tokens.tolist()
    torch.testing.assert_close(again.logits, proposal.logits)


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_published_draft_unrolls_as_it_drafts(
    layout: Layout, target: Target, tmp_path: Path
) -> None:
    layout.make(target).write(tmp_path)
    drafter = checkpoint.load(tmp_path, target)
    proposal = propose(drafter, target)
    text = torch.tensor([TEXT + proposal.tokens[0].tolist()])
    mask = torch.ones_like(text)
    taps = target.states(text, mask, drafter.taps)[0] if drafter.taps else None
    batch = UnrollBatch(input_ids=text, attention_mask=mask, taps=taps, num_steps=K)
    steps = list(drafter.unroll(batch))
    for depth in range(K):
        step = steps[min(depth, len(steps) - 1)]
        hidden = step.hidden[0, len(TEXT) + depth - step.offset]
        head = head_of(step, drafter)
        logits = (head @ hidden.to(head.dtype)).double()
        ids = slice(None) if drafter.vocab_map is None else drafter.vocab_map
        q = proposal.logits[0, depth, ids].double()
        torch.testing.assert_close(logits.log_softmax(-1), q.log_softmax(-1), rtol=1e-4, atol=1e-4)
