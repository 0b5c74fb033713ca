"""The unrolled loss against a plain float64 computation, position by position."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import unrolled_loss
from tests.unrolled import unroll_batch


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return Target.load(tiny_target("llama"), dtype=torch.float64)


def text(seed: int = 0) -> TextBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 288, (2, 9), generator=generator)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    weights = torch.rand(2, 9, generator=generator).double() * mask
    weights[:, :3] = 0.0
    return TextBatch(input_ids=ids, attention_mask=mask, weights=weights)


def by_hand(drafter, target, batch: TextBatch, num_steps: int, decay: float):
    """Loops over every (row, position, depth); the target's distribution of the token at j is at
    its state j - 1."""
    _, hidden = target.states(batch.input_ids, batch.attention_mask, drafter.taps)
    logits = target.head(hidden)
    total = torch.zeros((), dtype=torch.float64)
    keep = torch.zeros(*batch.input_ids.shape, num_steps, dtype=torch.float64)
    alphas = [[] for _ in range(num_steps)]
    unroll = unroll_batch(drafter, target, batch.input_ids, num_steps, batch.attention_mask)
    for depth, step in enumerate(drafter.unroll(unroll)):
        for row in range(2):
            for position in range(2, 9):
                weight = batch.weights[row, position]
                # Head depth s needs its anchor at j - 1 - s, whose pair begins at j - 2 - s.
                if weight == 0 or position - 2 - depth < 0:
                    continue
                p = logits[row, position - 1].softmax(-1)
                q = (step.hidden[row, position - 2] @ drafter.head_weight().T).softmax(-1)
                token = batch.input_ids[row, position]
                total = total + decay**depth * weight * (p * (p.log() - q.log())).sum()
                keep[row, position, depth] = (q[token] / p[token]).clamp(max=1).detach()
                alphas[depth].append(weight * torch.minimum(p, q).sum().detach())
    return total, keep, [sum(values) for values in alphas]


def test_loss_metrics_and_gradients_equal_the_plain_computation(target, table_drafter):
    drafter = table_drafter(288).double()
    batch = text()
    unrolled = unrolled_loss(drafter, LiveSource(target), batch, num_steps=3, decay=0.7)
    expected, keep, alphas = by_hand(drafter, target, batch, 3, 0.7)
    assert unrolled.total.item() == pytest.approx(expected.item(), rel=1e-10)
    assert unrolled.scale == pytest.approx(1 + 0.7 + 0.49)
    assert torch.allclose(unrolled.keep, keep, atol=1e-12)
    assert unrolled.sums.alpha.tolist() == pytest.approx([float(a) for a in alphas], rel=1e-10)
    ours = torch.autograd.grad(unrolled.total, list(drafter.parameters()))
    plain = torch.autograd.grad(expected, list(drafter.parameters()))
    for one, other in zip(ours, plain):
        assert torch.allclose(one, other, atol=1e-10)


def test_another_divergence_is_weighted_alike(target, table_drafter):
    """Total variation is 1 - alpha, so its total follows from the plain alphas."""
    drafter = table_drafter(288).double()
    batch = text()
    unrolled = unrolled_loss(
        drafter, LiveSource(target), batch, num_steps=3, decay=0.7, kind=kind_of("tv")
    )
    _, _, alphas = by_hand(drafter, target, batch, 3, 0.7)
    expected = sum(0.7**depth * (unrolled.sums.weight[depth] - alphas[depth]) for depth in range(3))
    assert unrolled.total.item() == pytest.approx(expected.item(), rel=1e-10)
    assert unrolled.sums.divergence.tolist() == pytest.approx(
        (unrolled.sums.weight - unrolled.sums.alpha).tolist()
    )


def test_a_shift_by_one_would_be_seen(target, table_drafter):
    """Negative control of the alignment: the same comparison fails when distributions are taken one
    position off."""
    drafter = table_drafter(288).double()
    batch = text()
    shifted = replace(batch, weights=batch.weights.roll(1, dims=1))
    unrolled = unrolled_loss(drafter, LiveSource(target), shifted, num_steps=3, decay=0.7)
    expected, _, _ = by_hand(drafter, target, batch, 3, 0.7)
    assert abs(unrolled.total.item() - expected.item()) > 1e-3


def test_padding_changes_nothing(target, table_drafter):
    drafter = table_drafter(288).double()
    batch, totals = text(), []
    for length in (6, 9):
        ids, mask, weights = (
            one[1:, :length] for one in (batch.input_ids, batch.attention_mask, batch.weights)
        )
        row = TextBatch(input_ids=ids, attention_mask=mask, weights=weights)
        found = unrolled_loss(drafter, LiveSource(target), row, num_steps=2, decay=1.0)
        totals.append(found.total.item())
    assert totals[0] == pytest.approx(totals[1], rel=1e-10)


def test_no_gradient_reaches_the_target_and_unweighted_text_gives_zero(target, table_drafter):
    drafter = table_drafter(288).double()
    nothing = replace(text(), weights=torch.zeros(2, 9).double())
    unrolled = unrolled_loss(drafter, LiveSource(target), nothing, num_steps=2, decay=1.0)
    unrolled.total.backward()
    assert unrolled.total.item() == 0.0
    # A rank without a trained token must still take part in the reduction of gradients.
    assert drafter.table.grad is not None
    assert all(parameter.grad is None for parameter in target.model.parameters())
