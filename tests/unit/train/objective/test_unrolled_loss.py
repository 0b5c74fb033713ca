"""The unrolled loss against a plain float64 computation, position by position; weights of depths,
the mean over passes and packed rows, and the loss of a draft's guess of its own alpha, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from draftsmith.drafters.blocks.dspark import Dspark
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import DraftLmOptions, DsparkOptions, Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.divergence.kind import kind_of
from draftsmith.train.config import UnrollConfig
from draftsmith.train.objective.teacher import LiveSource
from draftsmith.train.objective.unrolled_loss import UnrolledLoss, unrolled_loss
from draftsmith.train.trainer import Trainee
from tests.noise import noisy
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


def test_a_step_that_stands_for_several_depths_gets_their_weights(target):
    """A language model drafts alike at every depth, so its one step counts for all."""
    options = DraftLmOptions(num_layers=1, hidden_size=32)
    drafter = FAMILIES["draft-lm"].create(options, target, seed=0).to(torch.float64)
    ids = torch.randint(3, 288, (1, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    batch = TextBatch(input_ids=ids, attention_mask=mask, weights=(mask.cumsum(-1) > 2).double())
    alone, deep = (
        unrolled_loss(drafter, LiveSource(target), batch, num_steps=steps, decay=0.5)
        for steps in (1, 4)
    )
    assert deep.total.item() == pytest.approx(1.875 * alone.total.item(), rel=1e-12)
    assert deep.scale == 1.875


def test_the_mean_is_the_same_packed_apart_and_accumulated(target):
    """Three texts: a row each, all in one row, and one pass each, divided by what all of them
    count."""
    drafter = FAMILIES["eagle3"].create(Eagle3Options(), target, seed=0).to(torch.float64)
    trainee = Trainee(drafter, LiveSource(target), UnrollConfig(steps=3))
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 288, (size,), generator=generator) for size in (9, 4, 12)]
    weights = [(torch.arange(len(one)) >= 2).float() for one in ids]

    def passed(
        ids: torch.Tensor, weights: torch.Tensor, segments: torch.Tensor | None = None
    ) -> TextBatch:
        mask = (ids > 0).long()
        return TextBatch(input_ids=ids, attention_mask=mask, weights=weights, segments=segments)

    apart = [passed(one[None], weight[None]) for one, weight in zip(ids, weights)]
    rows = passed(*(pad_sequence(each, batch_first=True) for each in (ids, weights)))
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([len(one) for one in ids]))
    packed = passed(torch.cat(ids)[None], torch.cat(weights)[None], numbers[None])

    def loss(passes: list[TextBatch]) -> float:
        count = torch.stack([text.weights.sum() for text in passes]).sum()
        return sum(
            float(trainee(text, num_items_in_batch=count)["loss"].detach()) for text in passes
        )

    # The weights of tokens are float32.
    assert loss([rows]) == pytest.approx(loss(apart), rel=1e-6)
    assert loss([packed]) == pytest.approx(loss(apart), rel=1e-6)


STEPS, DECAY = 3, 0.7


@pytest.fixture
def drafter(target) -> Dspark:
    made = Dspark.create(DsparkOptions(block_size=4, markov_rank=6), target, seed=0).to(
        device=target.device, dtype=torch.float64
    )
    return noisy(made, 2)


def guessed(drafter: Dspark, target: Target) -> UnrolledLoss:
    return unrolled_loss(drafter, LiveSource(target), text(), num_steps=STEPS, decay=DECAY)


def test_the_loss_is_the_cross_entropy_of_guess_and_alpha(drafter, target):
    found = guessed(drafter, target)
    found.total.backward()
    gradient = drafter.confidence_head.proj.bias.grad.clone()
    # A head that says nothing has a loss and a gradient that can be summed from alpha alone.
    drafter.zero_grad()
    for parameter in drafter.confidence_head.parameters():
        parameter.data.zero_()
    silent = guessed(drafter, target)
    silent.total.backward()
    factors = torch.tensor([DECAY**depth for depth in range(STEPS)], dtype=torch.float64)
    divergence, weight, alpha = (
        values.double()
        for values in (silent.sums.divergence, silent.sums.weight, silent.sums.alpha)
    )
    expected = (factors * (divergence + weight * torch.log(torch.tensor(2.0)))).sum()
    torch.testing.assert_close(silent.total.detach().double(), expected, rtol=1e-5, atol=1e-5)
    expected = (factors * (0.5 * weight - alpha)).sum()
    torch.testing.assert_close(
        drafter.confidence_head.proj.bias.grad[0].double(), expected, rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(gradient, drafter.confidence_head.proj.bias.grad)


def test_alpha_is_no_way_around_the_divergence(drafter, target):
    """A guess is trained towards alpha, never alpha towards the guess: what does not feed the guess
    has the gradient it had."""
    drafter.confidence_head.proj.weight.data.zero_()
    grads = []
    for bias in (-3.0, 3.0):
        drafter.zero_grad()
        drafter.confidence_head.proj.bias.data.fill_(bias)
        guessed(drafter, target).total.backward()
        grads.append(drafter.markov_head.markov_w2.weight.grad.clone())
    torch.testing.assert_close(*grads)
